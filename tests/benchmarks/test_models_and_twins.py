"""Every click model of `hotbed.models` takes the losses of its twin of stock torch parts."""

import pytest

from benchmarks.models import TWINS, largest_difference
from hotbed.data import synthetic_clicks
from hotbed.models import MODELS


@pytest.mark.parametrize("name", TWINS)
def test_losses_are_those_of_the_twin(name):
    assert largest_difference(name, list(synthetic_clicks(5 * 64, 64, seed=1))) < 2e-5


def test_every_model_of_click_logs_has_a_twin():
    own = {name for name, kind in MODELS.items() if kind.__module__.startswith("hotbed.")}
    assert own - {*TWINS} == {"din", "two-tower"}  # which take histories and no dense columns
