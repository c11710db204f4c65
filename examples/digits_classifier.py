"""Train scikit-learn style classifiers over a parameter grid in parallel; save the best as ONNX."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import onchip

images, labels = load_digits(return_X_y=True)
x, x_test, y, y_test = train_test_split((images / 16).astype(np.float32), labels, random_state=0)

classifier = onchip.Classifier(hidden=(64,), epochs=10)
many = onchip.fit_many(classifier, x, y, grid={"lr": [0.03, 0.1, 0.3]}, folds=3)
print(many)

onchip.save(many.best.network_, "digits.onnx")
print(f"best: {many.best.score(x_test, y_test):.1%} of the test images")
