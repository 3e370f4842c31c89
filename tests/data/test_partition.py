from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fedstrata.data.dealing import normal_shares
from fedstrata.data.partition import PARTITIONS, PartitionInput, client_names, partition
from fedstrata.errors import UserError
from fedstrata.job.data_tables import Clients
from fedstrata.job.label_tables import TABLES
from fedstrata.plan.labels import sort_labels


def dealt(
    rows: int,
    seed: int = 0,
    labels: Any = None,
    values: Any = None,
    sources: Any = (),
    source_names: Any = (),
    **keys: Any,
) -> dict[str, list[int]]:
    rng = np.random.default_rng(seed)
    shards = partition(
        PartitionInput(
            Clients(**keys), rows, rng, labels, values=values, sources=sources, source_names=source_names
        )
    )
    return {name: shard.tolist() for name, shard in shards.items()}


def sizes(shards: dict[str, list[int]]) -> list[int]:
    return [len(shard) for shard in shards.values()]


def test_skewed_shares_of_six_are_the_papers() -> None:
    golden = [0.04779, 0.15454, 0.29767, 0.29767, 0.15454, 0.04779]
    assert normal_shares(6) == pytest.approx(golden, abs=5e-6)
    assert sizes(dealt(100_000, partition="quantity_skew")) == [4779, 15454, 29767, 29767, 15454, 4779]


@pytest.mark.parametrize("n", [1, 2, 7, 50])
def test_skewed_shares_are_symmetric_and_whole(n: int) -> None:
    shares = normal_shares(n)
    assert len(shares) == n
    assert shares.sum() == pytest.approx(1)
    assert shares == pytest.approx(shares[::-1])
    assert (np.diff(shares[1 : (n + 1) // 2]) > 0).all(), "beyond the end bin, which holds the tail, it rises"


@pytest.mark.parametrize(("count", "names"), [(2, "01"), (10, "0123456789")])
def test_names_are_numbers_from_nought(count: int, names: str) -> None:
    assert list(dealt(20, count=count)) == [f"client-{name}" for name in names]


def test_names_are_padded_so_that_they_sort() -> None:
    names = list(dealt(200, count=101))
    assert (names[0], names[9], names[100]) == ("client-000", "client-009", "client-100")
    assert names == sorted(names)
    assert list(dealt(20, count=11))[::10] == ["client-00", "client-10"]


def test_six_clients_by_default() -> None:
    assert sizes(dealt(60)) == [10] * 6


@pytest.mark.parametrize(("rows", "count"), [(49, 49), (100, 7), (12_547, 6), (5, 3)])
def test_iid_sizes_differ_by_one_at_most(rows: int, count: int) -> None:
    found = sizes(dealt(rows, count=count))
    assert sum(found) == rows
    assert set(found) <= {rows // count, -(-rows // count)}


def test_iid_deals_at_random() -> None:
    shards = dealt(1000, count=2)
    assert shards["client-0"] != list(range(500))
    assert 0.4 < np.mean(np.array(shards["client-0"]) < 500) < 0.6
    assert shards != dealt(1000, seed=1, count=2)


def test_sizes_are_rows_or_shares() -> None:
    assert sizes(dealt(10, partition="sizes", sizes=[1, 2, 3])) == [1, 2, 3]
    assert sizes(dealt(10, partition="sizes", sizes=[0.25, 0.25])) == [3, 2], "half of the rows stay undealt"
    assert sizes(dealt(10, partition="sizes", sizes=[1 / 3] * 3)) == [4, 3, 3]
    assert sizes(dealt(10, partition="sizes", sizes=[1.0])) == [10]
    assert sizes(dealt(10, partition="sizes", sizes=[5, 0], min_examples=0)) == [5, 0]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([0.5, 0.6], r"\[0.5, 0.6\]; expected numbers of rows"),
        ([2, 0.5], "numbers of rows"),
        ([-1, 2], "numbers of rows"),
        ([8, 3], "add up to 11 rows, but there are 10"),
    ],
)
def test_sizes_that_cannot_be_dealt_are_told(found: list[float], words: str) -> None:
    with pytest.raises(UserError, match=r"^\[clients\] sizes: .*" + words):
        dealt(10, partition="sizes", sizes=found)


def test_dirichlet_follows_alpha() -> None:
    labels = ["a", "b"] * 500
    even = dealt(1000, labels=labels, partition="dirichlet", count=4, alpha=1e9)
    for shard in even.values():
        assert Counter(labels[i] for i in shard) == {"a": 125, "b": 125}
    uneven = dealt(1000, labels=labels, partition="dirichlet", count=4, alpha=1e-9)
    assert sorted(sizes(uneven)) in ([1, 1, 1, 997], [1, 1, 499, 499]), "each label to one client"


def test_dirichlet_without_labels_varies_the_sizes() -> None:
    found = sizes(dealt(1000, partition="dirichlet", count=4, alpha=0.5))
    assert sum(found) == 1000
    assert max(found) - min(found) > 50


def test_too_few_rows_are_told() -> None:
    with pytest.raises(UserError, match=r"min_examples: is 1, but client-5 gets 0 of 5 rows"):
        dealt(5)
    with pytest.raises(UserError, match=r"min_examples: is 4, but client-0 gets 3 of 60 rows"):
        dealt(60, partition="quantity_skew", min_examples=4)
    with pytest.raises(UserError, match=r"min_examples: is 4, but 11 rows are too few for 3 clients"):
        dealt(11, partition="dirichlet", count=3, min_examples=4)
    with pytest.raises(UserError, match=r"min_examples: is 2, but oslo gets 1 of 3 rows"):
        dealt(3, values=["bern", "oslo", "bern"], partition="column", column="town", min_examples=2)


def test_a_column_names_the_clients() -> None:
    found = dealt(5, values=["oslo", "bern", "oslo", "rom", "bern"], partition="column", column="town")
    assert found == {"bern": [1, 4], "oslo": [0, 2], "rom": [3]}
    assert list(found) == ["bern", "oslo", "rom"]


def test_names_from_a_column_are_safe_and_different() -> None:
    values = ["a b", "a/b", "../x", "Oslo", "oslo", "server", "***", "x" * 90, "x" * 91, "عربي"]
    found = dealt(10, values=values, partition="column", column="town")
    names = {rows[0]: name for name, rows in found.items()}
    assert [names[i] for i in range(10)] == [
        *("a_b", "a_b-2", "_x", "Oslo", "oslo-2", "server-2", "_", "x" * 50, "x" * 50 + "-2", "عربي")
    ]
    assert list(found) == sorted(found)


def test_a_column_must_have_as_many_values_as_clients() -> None:
    values = ["a", "b", "a"]
    assert sizes(dealt(3, values=values, partition="column", column="town", count=2)) == [2, 1]
    with pytest.raises(UserError, match=r"\[clients\] count: is 3, but 'town' has 2 different values"):
        dealt(3, values=values, partition="column", column="town", count=3)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(["iid", "quantity_skew", "dirichlet", "dirichlet_mix", "sizes", "column"]),
    labels=st.lists(st.sampled_from("abcde"), min_size=1, max_size=60),
    count=st.integers(1, 12),
    least=st.integers(0, 3),
    alpha=st.floats(-9, 9).map(lambda exponent: 10**exponent),
    labeled=st.booleans(),
    seed=st.integers(0, 9),
)
def test_every_partition_is_disjoint_complete_ordered_and_repeatable(
    kind: str, labels: list[str], count: int, least: int, alpha: float, labeled: bool, seed: int
) -> None:
    rows = len(labels)
    keys: dict[str, Any] = {"partition": kind, "min_examples": least}
    if kind == "column":
        keys |= {"column": "town", "values": labels}
    elif kind == "sizes":
        keys["sizes"] = [rows // count] * count
    else:
        keys |= {"count": count, "alpha": alpha, "labels": labels if labeled or kind == "dirichlet_mix" else None}
    try:
        shards = dealt(rows, seed, **keys)
    except UserError:
        assert least, "nothing is refused where empty clients are allowed"
        assert kind != "dirichlet" or rows < count * least, "rows are moved as long as there are enough"
        return
    held = [row for shard in shards.values() for row in shard]
    assert len(set(held)) == len(held)
    assert set(held) <= set(range(rows))
    assert len(held) == (sum(keys["sizes"]) if kind == "sizes" else rows)
    assert min(sizes(shards)) >= least
    assert list(shards) == sorted(shards)
    assert all(shard == sorted(shard) for shard in shards.values())
    assert shards == dealt(rows, seed, **keys)


def mixes(shards: dict[str, list[int]], labels: list[str]) -> list[Counter[str]]:
    return [Counter(labels[i] for i in shard) for shard in shards.values()]


def test_sorted_cuts_numbers_by_value() -> None:
    """STS-B: consecutive parts of equal size; "10" is more than "9"."""
    labels = [str(value) for value in np.random.default_rng(0).integers(0, 51, 1000) / 5]
    shards = dealt(1000, labels=labels, partition="label_sorted", count=3)
    assert sizes(shards) == [334, 333, 333]
    values = [[float(labels[i]) for i in shard] for shard in shards.values()]
    assert max(values[0]) <= min(values[1]) <= max(values[1]) <= min(values[2])
    other = dealt(1000, seed=1, labels=labels, partition="label_sorted", count=3)
    assert other != shards, "equal values are shuffled"


def test_sorted_cuts_classes_too() -> None:
    labels = ["no", "yes"] * 30
    assert mixes(dealt(60, labels=labels, partition="label_sorted", count=2), labels) == [{"no": 30}, {"yes": 30}]


@pytest.mark.parametrize(
    ("name", "counts", "size"),
    [
        ("mrpc-3", {"0": 1323, "1": 2753}, 1260),
        ("cola-3", {"0": 2850, "1": 6744}, 3158),
        ("rte-3", {"entailment": 1395, "not_entailment": 1372}, 914),
        ("sst2-3", {"0": 30208, "1": 38013}, 20138),
        ("mrpc-10", {"0": 1323, "1": 2753}, 284),
    ],
)
def test_the_papers_tables_give_the_largest_equal_shards(name: str, counts: dict[str, int], size: int) -> None:
    """With GLUE's counts of training and development rows together, within a few rows of rounding."""
    labels = [label for label, n in counts.items() for _ in range(n)]
    shards = dealt(len(labels), labels=labels, partition="label_table", table=name)
    [found] = set(sizes(shards))
    assert size - 20 <= found <= size + 1
    for mix, row in zip(mixes(shards, labels), TABLES[name], strict=True):
        for label, share in zip(sorted(counts), row, strict=True):
            assert mix[label] == pytest.approx(found * share / 100, abs=1)
    wanted = [sum(row[i] for row in TABLES[name]) / 100 for i in range(len(counts))]
    assert any((found + 25) * share > n for share, n in zip(wanted, counts.values(), strict=True)), "the largest"


def test_shards_shrink_where_rounding_takes_a_row_too_many() -> None:
    """Two clients want half of each label: shards of three would take two rows of "0" each, of three."""
    half = {"0": 50, "1": 50}
    shards = dealt(6, labels=list("000111"), partition="label_table", table=[half, half])
    assert sizes(shards) == [2, 2]
    assert mixes(shards, list("000111")) == [{"0": 1, "1": 1}] * 2


@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=4),
    shares=st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4),
)
@settings(max_examples=60)
def test_a_table_of_any_kind_ends_in_equal_disjoint_shards(counts: list[int], shares: list[list[int]]) -> None:
    labels = [str(i) for i, n in enumerate(counts) for _ in range(n)]
    present = sorted(set(labels))
    table = []
    for row in shares:
        total = sum(row[: len(present)]) or 1
        table.append({label: share / total for label, share in zip(present, row, strict=False)})
    try:
        shards = dealt(len(labels), labels=labels, partition="label_table", table=table)
    except UserError:
        return  # too few rows, or a client without any share
    assert len(set(sizes(shards))) == 1
    rows = [i for shard in shards.values() for i in shard]
    assert len(rows) == len(set(rows)) <= len(labels)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"table": "mnli-3"}, "'mnli-3' is for 3 labels, the rows have 2"),
        ({"table": [{"0": 50, "2": 50}]}, "no label '2'"),
        ({"table": [{"0": 50, "1": 20}]}, "must add up to 100 or to 1, found [70.0]"),
    ],
)
def test_a_table_that_does_not_fit_is_told(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        dealt(10, labels=["0", "1"] * 5, partition="label_table", **keys)
    assert words in str(error.value)


@pytest.mark.parametrize("keys", [{"table": "mrpc3"}, {"table": "mrpc-3", "count": 4}, {}])
def test_a_table_must_be_there(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="table"):
        Clients(partition="label_table", **keys)


def test_labels_have_one_order() -> None:
    assert sort_labels(["10", "9", "-1", "2.5"]) == ["-1", "2.5", "9", "10"]
    assert sort_labels(["b", "a", "10"]) == ["10", "a", "b"]
    assert sort_labels(["1.0", "1", "0"]) == sort_labels(["0", "1", "1.0"])
    assert sort_labels(["nan", "b", "a"]) == sort_labels(["b", "nan", "a"]) == ["a", "b", "nan"]
    assert sort_labels(["nan", "2", "1"]) == ["1", "2", "nan"]


def test_labels_are_needed() -> None:
    with pytest.raises(UserError, match="'label_sorted' needs a label"):
        dealt(10, partition="label_sorted")


def test_every_named_source_is_a_client() -> None:
    found = dealt(5, sources=["s", "n", "s", "n", "n"], source_names=["s", "n"], partition="files")
    assert found == {"n": [1, 3, 4], "s": [0, 2]}
    assert list(found) == client_names(Clients(partition="files"), ["s", "n"]) == ["n", "s"]
    assert sizes(dealt(2, sources=["s", "n"], source_names=["s", "n"], partition="files", count=2)) == [1, 1]


def test_names_of_sources_are_those_of_other_clients() -> None:
    """None is called as the server is, and none like another where file names make no difference."""
    names = ["server", "Oslo", "oslo"]
    found = dealt(3, sources=names, source_names=names, partition="files")
    assert found == {"Oslo": [1], "oslo-2": [2], "server-2": [0]}


def test_sources_that_cannot_be_clients_are_told() -> None:
    with pytest.raises(UserError, match=r"\[clients\] partition: 'files' needs named sources"):
        dealt(5, partition="files")
    with pytest.raises(UserError, match=r"\[clients\] count: is 3, but \[data\] train names 2 sources"):
        dealt(2, sources=["s", "n"], source_names=["s", "n"], partition="files", count=3)
    with pytest.raises(UserError, match=r"min_examples: is 1, but n gets 0 of 2 rows"):
        dealt(2, sources=["s", "s"], source_names=["s", "n"], partition="files")


def test_a_partition_that_does_not_exist_is_told() -> None:
    with pytest.raises(UserError, match=r"\[clients\] partition: 'colum' is invalid; did you mean 'column'"):
        dealt(5, partition="colum")


@pytest.mark.parametrize("name", PARTITIONS)
def test_clients_are_known_without_rows(name: str) -> None:
    options: dict[str, Any] = {
        "sizes": {"sizes": [4, 2]},
        "label_table": {"table": [{"a": 1, "b": 0}, {"b": 1}]},
    }
    if name == "column":
        return  # whose clients are known from its rows alone
    keys = {"partition": name, **options.get(name, {})}
    named = {"sources": ["s", "n"] * 30, "source_names": ["s", "n"]} if name == "files" else {}
    found = dealt(60, labels=["a", "b"] * 30, **keys, **named)
    assert list(found) == client_names(Clients(**keys), named.get("source_names", ()))


def test_a_mix_per_client_has_equal_shards_and_follows_alpha() -> None:
    labels = ["a"] * 600 + ["b"] * 300 + ["c"] * 100
    even = dealt(1000, labels=labels, partition="dirichlet_mix", count=4, alpha=1e9)
    assert sizes(even) == [250] * 4
    assert [mix["a"] for mix in mixes(even, labels)] == [150] * 4
    labels = ["a"] * 500 + ["b"] * 500
    one = mixes(dealt(1000, labels=labels, partition="dirichlet_mix", count=4, alpha=1e-9), labels)
    assert sorted(map(dict, one), key=str) == [{"a": 250}] * 2 + [{"b": 250}] * 2


def test_a_mix_is_drawn_around_that_of_all_rows() -> None:
    """Over many draws a label's mean share is that in all rows, and the variance that of Dir(alpha p)."""
    labels = ["a"] * 60_000 + ["b"] * 40_000
    shares = []
    for seed in range(40):
        first = dealt(100_000, seed, labels=labels, partition="dirichlet_mix", count=10, alpha=2.0)["client-0"]
        shares.append(np.mean(np.asarray(first) < 60_000))
    assert np.mean(shares) == pytest.approx(0.6, abs=0.1)
    assert np.var(shares) == pytest.approx(0.6 * 0.4 / 3, abs=0.03)


def test_a_label_that_has_run_out_is_replaced_by_what_is_left() -> None:
    labels = ["a"] * 4 + ["b"] * 60 + ["c"] * 20
    shards = dealt(84, 3, labels=labels, partition="dirichlet_mix", count=6, alpha=0.1)
    assert sizes(shards) == [14] * 6
    with pytest.raises(UserError, match="'dirichlet_mix' needs a label for every row"):
        dealt(84, partition="dirichlet_mix", count=6)
