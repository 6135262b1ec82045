"""The whole chain: a log read by forked workers beside a process that uses OpenMP."""

import pytest
import torch
from torch.utils.data import DataLoader

import hotbed as hb
from hotbed.data import CATEGORIES, CriteoLog, write_criteo_tsv
from hotbed.train import evaluate, fit


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_two_workers_train_the_same_model_as_none(tmp_path):
    path = tmp_path / "clicks.tsv.gz"
    write_criteo_tsv(path, 3_000, table_rows=[30] * 26)
    training, test = CriteoLog(path, 256).split(0.1)
    evaluations = []
    for workers in (0, 2):
        torch.manual_seed(0)
        model = hb.models.DLRM(CATEGORIES, dim=8, seed=0)
        optimizer = hb.optim.Adam(model.parameters(), lr=1e-2)
        batches = DataLoader(training, batch_size=None, num_workers=workers)
        # The second epoch forks after this process has used OpenMP for a whole epoch.
        result = fit(model, batches, optimizer, epochs=2)
        assert result.rows == 2 * 2_700 and result.epochs == 2
        evaluations.append(evaluate(model, test))
    assert evaluations[0].logloss == evaluations[1].logloss
    assert evaluations[0].rows == 300
