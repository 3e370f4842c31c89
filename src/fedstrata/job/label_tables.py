"""Label tables of FedSplitBERT (Tables I and II): what per cent of each client's rows belongs to which class.

Per client the shares stand in the order of the classes, numbers by value and words by the alphabet. In print the
share of label 1 comes first. Table I gives 95 and 15 % for the first client of MRPC; that must be 95 and 5.
"""

from __future__ import annotations

MIXED_3 = ((20, 80), (50, 50), (80, 20))
MIXED_10 = tuple((100 - share, share) for share in (90, 80, 70, 60, 50, 40, 30, 20, 10, 2))

TABLES: dict[str, tuple[tuple[float, ...], ...]] = {
    "mrpc-3": ((5, 95), (25, 75), (75, 25)),
    "cola-3": ((9.5, 90.5), (17, 83), (60, 40)),
    "qqp-3": ((30, 70), (63, 37), (87, 13)),
    "mnli-3": ((86, 5, 9), (5, 90, 5), (5, 5, 90)),
    "sst2-3": MIXED_3,
    "rte-3": MIXED_3,
    "qnli-3": MIXED_3,
    "wnli-3": MIXED_3,
    "qqp-10": MIXED_10,
    "sst2-10": MIXED_10,
    "qnli-10": MIXED_10,
    "mrpc-10": tuple((100 - share, share) for share in (92, 86, 71, 66, 50, 44, 35, 28, 12, 51)),
}
