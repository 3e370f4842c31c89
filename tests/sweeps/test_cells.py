"""The cells of a sweep: which jobs, by which names, in which folders."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstrata.errors import UserError
from fedstrata.job.file import load
from fedstrata.sweeps.cells import Cell, cells

JOB = """
[model]
name = "folder"
[clients]
count = 3
[output]
dir = "runs/many"
[[stages]]
name = "pretrain"
task.kind = "mlm"
data.train = "a.txt"
method = {name = "fedbfpt", rounds = 2, local_layers = 2}
[[stages]]
name = "finetune"
task.kind = "classify"
data.train = "b.csv"
method = {name = "fedbt", rounds = 3}
"""


def made(sweep: str, *overrides: str) -> list[Cell]:
    return cells(tomllib.loads(JOB + sweep), overrides)[2]


def jobs(cell: Cell) -> list[Any]:
    return load(tomllib.loads(JOB), cell.pairs)


def test_every_row_at_every_point_with_every_seed() -> None:
    found = made(
        """
        [sweep]
        seeds = [0, 7]
        grid = {finetune.method.cycle = [1, 2], pretrain.train.learning_rate = [1e-4]}
        [[sweep.rows]]
        name = "FedAvg"
        pretrain.method.name = "fedavg"
        [[sweep.rows]]
        name = 'FedBFPT\\M'
        pretrain.method.variant = "m"
        """
    )
    assert [cell.row for cell in found[::2]] == [
        "FedAvg, cycle=1, learning_rate=0.0001",
        "FedBFPT\\M, cycle=1, learning_rate=0.0001",
        "FedAvg, cycle=2, learning_rate=0.0001",
        "FedBFPT\\M, cycle=2, learning_rate=0.0001",
    ]
    assert [cell.seed for cell in found] == [0, 7] * 4
    assert len({cell.folder for cell in found}) == 8
    assert all(cell.folder.parent.parent == Path("runs/many/cells") for cell in found)
    pretrain, finetune = jobs(found[7])
    assert pretrain.method.variant == "m"
    assert (pretrain.train.learning_rate, finetune.train.learning_rate) == (1e-4, 5e-5)
    assert finetune.method.cycle == 2
    assert pretrain.train.seed == finetune.train.seed == 7
    assert pretrain.output.dir == str(found[7].folder)


@pytest.mark.parametrize(
    "grid",
    [
        "[sweep.grid]\nfinetune.method.cycle = [1, 2]",
        '[sweep.grid]\n"finetune.method.cycle" = [1, 2]',
        "[sweep]\ngrid.finetune = {method = {cycle = [1, 2]}}",
    ],
)
def test_keys_may_be_written_as_tables_or_dotted(grid: str) -> None:
    assert [cell.row for cell in made(grid)] == ["cycle=1", "cycle=2"]


def test_keys_that_end_alike_are_named_in_full() -> None:
    [cell] = made("[sweep.grid]\npretrain.method.rounds = [1]\nfinetune.method.rounds = [2]")
    assert cell.row == "pretrain.method.rounds=1, finetune.method.rounds=2"


def test_seeds_alone_are_a_sweep_and_may_vary_one_stage() -> None:
    found = made('[sweep]\nseeds = [1, 2]\nseed = "finetune.train.seed"')
    assert [(cell.row, cell.seed) for cell in found] == [("all", 1), ("all", 2)]
    assert [job.train.seed for job in jobs(found[1])] == [0, 2]
    assert found[0].stages["pretrain"] == found[1].stages["pretrain"]
    assert found[0].stages["finetune"] != found[1].stages["finetune"]


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("[sweep.grid]\ntrain.seed = [0, 1]", ()),
        ('[[sweep.rows]]\nname = "a"\ntrain = {seed = 5}', ()),
        ('[[sweep.across]]\nname = "a"\nfinetune.train.seed = 5', ()),
        ('[sweep]\nseed = "finetune.train.seed"\n[sweep.grid]\nfinetune.train.seed = [0, 1]', ()),
        ("[sweep]\nseeds = [0, 1]", ("train.seed=7",)),
    ],
)
def test_a_seed_that_the_cells_own_would_take_back_is_refused(sweep: str, words: tuple[str, ...]) -> None:
    """The rows seed=0 and seed=1 of a grid were runs of one and the same seed."""
    with pytest.raises(UserError, match=r"train\.seed: every cell has its seed from sweep\.seeds"):
        made(sweep, *words)


def test_a_seed_of_another_stage_may_be_a_rows() -> None:
    [cell] = made('[sweep]\nseed = "finetune.train.seed"\n[[sweep.rows]]\nname = "a"\ntrain.seed = 5')
    assert [job.train.seed for job in jobs(cell)] == [5, 0]


def test_rows_that_differ_in_a_later_stage_share_the_earlier() -> None:
    one, two, three = made(
        """
        [[sweep.rows]]
        name = "a"
        [[sweep.rows]]
        name = "b"
        finetune.method.cycle = 1
        [[sweep.rows]]
        name = "c"
        pretrain.method.variant = "pl"
        """
    )
    assert one.stages["pretrain"] == two.stages["pretrain"] != three.stages["pretrain"]
    assert len({cell.stages["finetune"] for cell in (one, two, three)}) == 3, "another start, another result"


def test_words_lie_under_the_rows_and_over_the_file() -> None:
    sweep = '[[sweep.rows]]\nname = "a"\npretrain.method.local_layers = 1'
    [cell] = made(sweep, "pretrain.method.local_layers=2", "train.epochs=3", "sweep.seeds=[5]", "output.dir=x")
    assert cell.seed == 5
    assert cell.folder == Path("x/cells/a/seed-5")
    assert jobs(cell)[0].method.local_layers == 1
    assert jobs(cell)[0].train.epochs == 3


def test_what_a_row_says_of_clients_is_taken_whole_with_dots_in_their_names() -> None:
    sources = '{north = "n.csv", south = "s.csv"}'
    one, two = made(
        f"""
        [[sweep.rows]]
        finetune.data.train = {sources}
        finetune.method.local_layers = {{default = 2, "St._Mary_s" = 1}}
        [[sweep.rows]]
        name = "other"
        finetune.data.train.east = "e.csv"
        """,
        f"finetune.data.train={sources}",
    )
    job = jobs(one)[1]
    assert job.data.train == {"north": "n.csv", "south": "s.csv"}
    assert job.method.local_layers == {"default": 2, "St._Mary_s": 1}
    assert jobs(two)[1].data.train == {"east": "e.csv"}, "rows of other sources are not mixed with it"


def test_a_row_that_changes_the_method_drops_its_options() -> None:
    [cell] = made('[[sweep.rows]]\nname = "a"\npretrain.method.name = "none"')
    assert jobs(cell)[0].method.rounds == 0


def test_names_that_no_folder_can_have_stay_apart() -> None:
    found = made('[sweep.grid]\ndata.train = ["a/b.txt", "a b.txt", "a-b.txt", "../x"]')
    assert len({cell.folder for cell in found}) == 4
    assert all(".." not in cell.folder.parts for cell in found)


def test_names_that_begin_alike_for_long_stay_apart() -> None:
    """Two rows shared a folder, and the second, if its learning rate was lower, had the first one's scores."""
    rows = "".join(f'[[sweep.rows]]\nname = "{"a" * 90}{i}"\ntrain.learning_rate = 1e-{i}\n' for i in (3, 4))
    assert len({cell.folder for cell in made(rows)}) == 2


@pytest.mark.parametrize("names", [("FedAvg", "fedavg"), (f"{'a' * 80} 3492", f"{'a' * 80} 5042")])
def test_names_that_differ_in_case_or_begin_alike_and_share_a_short_hash_stay_apart(
    names: tuple[str, str],
) -> None:
    """On some disks the first two were one folder; the hashes of the others begin with the same 24 bits."""
    rows = "".join(f'[[sweep.rows]]\nname = "{name}"\n' for name in names)
    found = [str(cell.folder) for cell in made(rows)]
    assert found[0].casefold() != found[1].casefold()


def test_rows_are_compared_at_the_same_point() -> None:
    found = made(
        """
        [sweep]
        against = "FedAvg"
        grid.finetune.method.cycle = [1, 2]
        [[sweep.across]]
        name = "biology"
        pretrain.data.train = "bio.txt"
        [[sweep.across]]
        name = "law"
        pretrain.data.train = "law.txt"
        [[sweep.rows]]
        name = "FedAvg"
        pretrain.method.name = "fedavg"
        [[sweep.rows]]
        name = "FedBFPT"
        """
    )
    assert len(found) == 8
    assert [cell.row for cell in found[:3]] == [
        "FedAvg, biology, cycle=1",
        "FedBFPT, biology, cycle=1",
        "FedAvg, biology, cycle=2",
    ]
    assert [cell.base for cell in found[:2]] == [None, "FedAvg, biology, cycle=1"]
    assert found[-1].base == "FedAvg, law, cycle=2"
    assert jobs(found[-1])[0].data.train == "law.txt"


def test_without_rows_a_point_of_the_grid_is_compared_with() -> None:
    found = made('[sweep]\nagainst = "cycle=2"\ngrid.finetune.method.cycle = [1, 2]')
    assert [cell.base for cell in found] == ["cycle=2", None]
