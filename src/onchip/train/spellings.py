"""Answers to parameters as scikit-learn, torch and Keras spell them: the error names onchip's."""

from __future__ import annotations

from typing import Any, Self

from onchip.errors import InputError
from onchip.network.names import did_you_mean

SPELLINGS = {
    "random_state": "seed", "hidden_layer_sizes": "hidden", "max_iter": "epochs", "n_epochs": "epochs",
    "learning_rate_init": "lr", "learning_rate": "lr", "solver": "optimiser", "optimizer": "optimiser",
    "alpha": "weight_decay", "nesterovs_momentum": "nesterov", "validation_fraction": "validation",
    "n_iter_no_change": "patience", "n_jobs": "threads",
}  # fmt: skip
# Parameters without a counterpart, and what there is.
_OTHERS = {
    "verbose": "training prints nothing; history_ and loss_curve_ hold every epoch",
    "warm_start": "partial_fit continues from the weights of the last call",
    "tol": "early_stopping=True, patience=10",
}


class KnownSpellings:
    """Mixin of an estimator: InputError for an unknown parameter, with the right one."""

    def __new__(cls, *args: Any, **given: Any) -> Self:
        cls._check_names(given)
        return super().__new__(cls)

    def set_params(self, **given: Any) -> Self:
        self._check_names({name.partition("__")[0]: value for name, value in given.items()})
        return super().set_params(**given)  # type: ignore[misc,no-any-return]

    @classmethod
    def _check_names(cls, given: dict[str, Any]) -> None:
        known = cls._get_param_names()  # type: ignore[attr-defined]  # of BaseEstimator
        for name, value in given.items():
            if name in known:
                continue
            hint = _OTHERS.get(name, "") or did_you_mean(name, known) or "leave it out"
            if name in SPELLINGS:
                hint = f"{SPELLINGS[name]}={value!r}"
            got, expected = f"{name}={value!r}", ", ".join(known)
            raise InputError(f"{cls.__name__} has no parameter '{name}'", got=got, expected=expected, hint=hint)
