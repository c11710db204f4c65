"""Names that users type: any case; an unknown one is answered with the nearest."""

import pytest

from onchip.errors import DeviceError, InputError
from onchip.network.names import did_you_mean, known_name
from onchip.network.training import TrainingStep
from onchip.plan.kernel import Job
from onchip.train.options import TrainOptions

KNOWN = ("decode", "LeakyReLU", "fp16")


@pytest.mark.parametrize("name", ["decode", "DECODE", "Decode"])
def test_case_does_not_matter(name):
    assert known_name(name, KNOWN, "model") == "decode"


def test_a_name_is_spelt_as_it_is_known():
    assert known_name("leakyrelu", KNOWN, "activation") == "LeakyReLU"
    assert Job("FP16", without=("Fold",)) == Job("fp16", without=("fold",))
    assert TrainingStep("MSE", "Adam") == TrainingStep("mse", "adam")
    assert TrainOptions(optimiser="Adam", loss="MSE") == TrainOptions(optimiser="adam", loss="mse")


def test_the_nearest_name_is_the_hint():
    with pytest.raises(InputError) as caught:
        known_name("decod", KNOWN, "model", hint="something else")
    assert (caught.value.what, caught.value.got) == ("unknown model", "decod")
    assert (caught.value.expected, caught.value.hint) == ("decode, LeakyReLU, fp16", "did you mean decode?")


@pytest.mark.parametrize("name", ["zzz", "", None, 7, "x" * 10_000])
def test_without_a_near_name_the_hint_is_the_callers(name):
    with pytest.raises(DeviceError) as caught:
        known_name(name, KNOWN, "device", hint="onchip devices", error=DeviceError)
    assert caught.value.hint == "onchip devices"


def test_no_name_is_near_an_empty_one():
    assert did_you_mean("decode", ()) == ""
