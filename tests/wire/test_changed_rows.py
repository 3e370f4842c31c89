"""A session that sends what changed: both ends hold the same, within bounds, whatever the other end is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedstrata.errors import UserError
from fedstrata.wire.activations import StreamForm, message_bytes, pack
from fedstrata.wire.changed_rows import ChangedClient, ChangedServer
from fedstrata.wire.codec import WireError, payload_bytes
from fedstrata.wire.row_cache import RowCache
from fedstrata.wire.rows import RowForm, decode_rows, encode_rows
from fedstrata.wire.stream_ends import PlainClient, client_end, server_end

WIDTH, LENGTHS, ROOM = 32, (4, 2, 5), 10_000
SIZES = [4 * WIDTH * tokens for tokens in LENGTHS]
FORMS = [(RowForm(), RowForm()), (RowForm("int4", 0.5), RowForm("fp16")), (RowForm("fp16"), RowForm("int8", 0.3))]


def texts(seed: int = 0) -> list[torch.Tensor]:
    """The hidden states of each example."""
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, WIDTH, generator=draw) for tokens in LENGTHS]


def padded(chosen: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)


def ends(
    folder: Path,
    threshold: float = 0.1,
    states: RowForm = FORMS[0][0],
    gradients: RowForm = FORMS[0][1],
    **rooms: int,
) -> tuple[ChangedClient, ChangedServer]:
    form = StreamForm(states, gradients, threshold)
    client = client_end(form, WIDTH, folder / "client", rooms.get("client", ROOM))
    server = server_end(form, WIDTH, 16, 2, folder / "server", rooms.get("server", ROOM))
    assert isinstance(client, ChangedClient)
    assert isinstance(server, ChangedServer)
    return client, server


def sent(
    client: ChangedClient, hidden: list[torch.Tensor], examples: list[int], read: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([len(hidden[i]) for i in examples])
    client.examples = torch.tensor(examples)
    client.read = torch.ones(int(lengths.sum()), dtype=torch.bool) if read is None else read
    return client.send_states(padded([hidden[i] for i in examples]), lengths)


@pytest.mark.parametrize("threshold", [0.0, 0.1])
@pytest.mark.parametrize(("states", "gradients"), FORMS)
def test_both_ends_hold_the_same_and_errors_do_not_add_up(
    tmp_path: Path, states: RowForm, gradients: RowForm, threshold: float
) -> None:
    client, server = ends(tmp_path, threshold, states, gradients)
    hidden, rows_sent = texts(), 0
    drift = [0.03 * torch.randn(one.shape, generator=torch.Generator().manual_seed(9)) for one in hidden]
    for _ in range(8):  # a drift that no single epoch lets through, and that goes on in one direction
        for examples in ([2, 0], [1]):
            message = sent(client, hidden, examples)
            rows_sent += len(message["activations"])
            got, lengths = server.receive_states(message)
            assert lengths.tolist() == [LENGTHS[i] for i in examples]
            here, there = client.cache.of(torch.tensor(examples), lengths)
            assert there.all()
            assert torch.equal(got, here), "what the server computes with is what the client compares with"
            true = torch.cat([hidden[i] for i in examples])
            arrives = decode_rows("x", encode_rows("x", true, states), WIDTH, states)
            assert ((got - arrives).norm(dim=1) <= threshold * got.norm(dim=1) * 1.001).all()
        hidden = [one + step for one, step in zip(hidden, drift, strict=True)]
    assert 11 < rows_sent < 6 * 11 if threshold else rows_sent > 6 * 11


def test_what_did_not_move_is_left_out_and_what_moved_is_not(tmp_path: Path) -> None:
    client, server = ends(tmp_path, 0.0)
    hidden = texts()
    for moved in ([], [1, 8], [3]):
        rows = torch.cat([hidden[0], hidden[2]])
        rows[moved] += 1e-6
        hidden[0], hidden[2] = rows.split([4, 5])
        message = sent(client, hidden, [0, 2])
        first = not server.cache.places
        assert len(message["activations"]) == (9 if first else max(1, len(moved)))
        assert torch.equal(server.receive_states(message)[0], rows)


def test_a_state_of_zeros_is_sent_the_first_time_too(tmp_path: Path) -> None:
    client, server = ends(tmp_path)
    hidden = texts()
    hidden[0][:] = 0
    assert torch.equal(server.receive_states(sent(client, hidden, [0]))[0], hidden[0])


def test_states_that_are_not_finite_are_sent_and_refused(tmp_path: Path) -> None:
    client, server = ends(tmp_path)
    hidden = texts()
    server.receive_states(sent(client, hidden, [0]))
    hidden[0][2, 3] = torch.nan
    with pytest.raises(WireError, match="not finite"):
        server.receive_states(sent(client, hidden, [0]))


@pytest.mark.parametrize("room", [0, SIZES[0], SIZES[0] + SIZES[1] + 1])
def test_a_full_cache_takes_no_more_and_what_it_lacks_is_sent_whole(tmp_path: Path, room: int) -> None:
    client, server = ends(tmp_path, client=room, server=room)
    hidden, kept = texts(), {0: [], SIZES[0]: [0]}.get(room, [0, 1])
    for epoch in range(3):
        for example in range(3):
            message = sent(client, hidden, [example])
            known = epoch and example in kept
            assert len(message["activations"]) == (1 if known else LENGTHS[example])
            assert torch.equal(server.receive_states(message)[0], hidden[example])
    for cache in (client.cache, server.cache):
        assert sorted(cache.places) == kept
        assert cache.used <= room
        assert (cache.file is None) == (not kept)
        assert not list(cache.folder.glob("*")), "a file without a name"
        if cache.file:
            assert cache.file.seek(0, 2) == cache.used


def test_a_site_with_less_room_than_the_server_is_understood(tmp_path: Path) -> None:
    client, server = ends(tmp_path, client=SIZES[0], server=ROOM)
    hidden = texts()
    for _ in range(2):
        for example in range(3):
            hidden[example] = hidden[example] + 1
            assert torch.equal(server.receive_states(sent(client, hidden, [example]))[0], hidden[example])


def test_what_a_site_keeps_in_less_room_the_server_keeps_too(tmp_path: Path) -> None:
    """Of texts of 4, 3 and 2 tokens 6 would hold the first and the last, 7 the first two."""
    client, server = ends(tmp_path, client=6 * 4 * WIDTH, server=7 * 4 * WIDTH)
    four, two, five = texts()
    hidden = [four, five[:3], two]
    for _ in range(2):
        for example in range(3):
            assert torch.equal(server.receive_states(sent(client, hidden, [example]))[0], hidden[example])
    assert client.cache.places.keys() < server.cache.places.keys()


def test_a_session_forgets_at_its_end(tmp_path: Path) -> None:
    client, server = ends(tmp_path)
    server.receive_states(sent(client, texts(), [0]))
    message = sent(client, texts(), [0])
    server.close()
    with pytest.raises(WireError, match="not held"):
        server.receive_states(message)


LENGTHS_OF_TWO = torch.tensor([4, 5])
READ = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 0], dtype=torch.bool)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("states", "gradients"), FORMS)
def test_the_rest_of_a_batch_is_as_between_plain_ends(
    tmp_path: Path, states: RowForm, gradients: RowForm, wanted: bool
) -> None:
    """But for what nobody reads; and never with more bytes than were told before."""
    client, server = ends(tmp_path, 0.1, states, gradients)
    plain, hidden, lengths = PlainClient(client.form), texts(), LENGTHS_OF_TWO
    both = padded([hidden[0], hidden[2]])
    plain.send_states(both, lengths)
    up = sent(client, hidden, [0, 2], READ)
    server.receive_states(up)

    down = server.send_states(2 * both, lengths)
    rows = pack(2 * both, lengths)
    expected = decode_rows("x", encode_rows("x", rows, states), WIDTH, states)
    assert torch.equal(client.receive_states(down), expected * READ[:, None])

    loss = 1e-5 * both
    loss[~READ_OF_TWO] = 0
    above = client.send_gradients(loss, lengths, wanted)
    assert len(above["gradients"]) == 3
    assert torch.equal(
        server.receive_gradients(above), plain.receive_gradients(plain.send_gradients(loss, lengths, True))
    )

    below = server.send_gradients(1e-5 * both, lengths)
    expected = plain.receive_gradients(plain.send_gradients(1e-5 * both, lengths, True))
    assert bool(below) == wanted
    assert torch.equal(client.receive_gradients(below), expected * wanted)

    most = message_bytes(9, 2, WIDTH, client.form)
    assert payload_bytes(up) == most["up", "activations"], "in the first epoch everything is new"
    assert payload_bytes(above) == payload_bytes(below) - 6 * gradients.row_bytes(WIDTH) + 1 or not wanted
    assert payload_bytes(below) == (most["down", "gradients"] if wanted else 0)
    assert payload_bytes(down) == 3 * states.row_bytes(WIDTH)


READ_OF_TWO = torch.zeros(2, 5, dtype=torch.bool)
READ_OF_TWO[torch.arange(5) < LENGTHS_OF_TWO[:, None]] = READ


def test_a_loss_over_tokens_that_were_not_read_is_told(tmp_path: Path) -> None:
    client, server = ends(tmp_path)
    server.receive_states(sent(client, texts(), [0, 2], READ))
    gradients = torch.ones(2, 5, WIDTH)
    with pytest.raises(UserError, match="depends on hidden states at other tokens than"):
        client.send_gradients(gradients, LENGTHS_OF_TWO, True)


def test_bytes_of_many_batches_stay_below_their_bound() -> None:
    """Bitmaps are rounded up batch by batch."""
    form = StreamForm(*FORMS[1], 0.1)
    batches = [(7, 1), (9, 3), (16, 2), (1, 1)]
    together = message_bytes(sum(n for n, _ in batches), sum(b for _, b in batches), WIDTH, form, len(batches))
    for way in together:
        assert together[way] >= sum(message_bytes(n, b, WIDTH, form)[way] for n, b in batches)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def bits(number: int, size: int = 2) -> torch.Tensor:
    return torch.tensor([number >> (8 * place) & 255 for place in range(size)], dtype=torch.uint8)


ROWS = "activations:rows"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"examples": int32(0, 1)}, "1 had 2 tokens and now has 5"),
        ({"examples": int32(0, 7)}, f"{ROWS}: leaves out tokens of an example that is not held"),
        ({"examples": int32(2, 2)}, "examples: must be different numbers from 0 up"),
        ({"examples": int32(0, -1)}, "examples: must be different numbers from 0 up"),
        ({"examples": torch.tensor([0, 2])}, "examples: must be one number for each text"),
        ({"examples": int32(0)}, "examples: must be one number for each text"),
        ({"lengths": int32(4, 17)}, "lengths: must be from 1 to 16"),
        ({"lengths": int32(4, 4, 1)}, "lengths: are of 3 texts, a batch has 2 at most"),
        ({"lengths": int32(4, 16)}, "read: must be one bit for each of 20 tokens"),
        ({ROWS: bits(0)}, f"{ROWS}: must name at least one token, and none beyond the 9"),
        ({ROWS: bits(0b10_0000_0000)}, f"{ROWS}: must name at least one token, and none beyond the 9"),
        ({ROWS: bits(1, 3)}, f"{ROWS}: must be one bit for each of 9 tokens"),
        ({ROWS: bits(0b11)}, "activations: is torch.float32"),
        ({"read": bits(0)}, "read: must name at least one token"),
        ({"read": bits(1 << 12)}, "read: must name at least one token, and none beyond the 9"),
        ({"read": torch.zeros(2)}, "read: must be one bit"),
        ({"activations": torch.zeros(3, WIDTH)}, "activations: is torch.float32"),
        ({"activations": torch.full((1, WIDTH), torch.inf)}, "not finite"),
        ({"input_ids": torch.zeros(1)}, "names differ"),
    ],
)
def test_a_hostile_client_is_refused_in_a_sentence(tmp_path: Path, changes: Any, words: str) -> None:
    client, server = ends(tmp_path)
    for examples in ([0, 2], [1]):
        server.receive_states(sent(client, texts(), examples))
    message = sent(client, texts(), [0, 2])
    with pytest.raises(WireError, match=words):
        server.receive_states({**message, **changes})
    rows, _ = server.receive_states(message)
    assert torch.equal(rows, torch.cat([texts()[0], texts()[2]])), "nothing of it was taken over"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("wanted"), "wanted: must be one number, 0 or 1"),
        (lambda m: m.update(wanted=torch.tensor([2], dtype=torch.uint8)), "wanted: must be one number, 0 or 1"),
        (lambda m: m.pop("gradients:rows"), "gradients:rows: must be one bit for each of 9 tokens"),
        (lambda m: m.update({"gradients:rows": bits(0b11)}), "gradients: is torch.float32"),
        (lambda m: m.update(gradients=torch.full((9, WIDTH), torch.nan)), "not finite"),
        (lambda m: m.update(more=torch.zeros(1)), "names differ"),
    ],
)
def test_gradients_are_checked_at_both_ends(tmp_path: Path, change: Callable[[Any], Any], words: str) -> None:
    client, server = ends(tmp_path)
    server.receive_states(sent(client, texts(), [0, 2]))
    ones = torch.ones(2, 5, WIDTH)
    up = client.send_gradients(ones, LENGTHS_OF_TWO, True)
    change(up)
    with pytest.raises(WireError, match=words):
        server.receive_gradients(up)
    server.receive_gradients(client.send_gradients(ones, LENGTHS_OF_TWO, True))
    down = server.send_gradients(ones, LENGTHS_OF_TWO)
    down["wanted"] = torch.ones(1)
    with pytest.raises(WireError, match="names differ"):
        client.receive_gradients(down)
    client.wanted = False
    with pytest.raises(WireError, match="were not asked for"):
        client.receive_gradients(server.send_gradients(ones, LENGTHS_OF_TWO))


def test_few_bytes_never_make_many(tmp_path: Path) -> None:
    """Lengths of many texts in one message: refused before anything of their size is made."""
    _, server = ends(tmp_path)
    many = torch.full((1_000_000,), 16, dtype=torch.int32)
    with pytest.raises(WireError, match="1000000 texts, a batch has 2 at most"):
        server.receive_states({"lengths": many, "examples": torch.arange(1_000_000, dtype=torch.int32)})


def test_a_cache_reads_what_was_put_last(tmp_path: Path) -> None:
    cache = RowCache(tmp_path, WIDTH, ROOM)
    for seed in range(3):
        hidden = texts(seed)
        cache.put(torch.tensor([2, 0]), torch.tensor([5, 4]), torch.cat([hidden[2], hidden[0]]))
    rows, there = cache.of(torch.tensor([0, 1, 2]), torch.tensor(LENGTHS))
    assert torch.equal(rows[:4], hidden[0])
    assert torch.equal(rows[6:], hidden[2])
    assert there.tolist() == [True] * 4 + [False] * 2 + [True] * 5
    assert cache.used == SIZES[0] + SIZES[2]
    cache.close()
    assert not cache.of(torch.tensor([0]), torch.tensor([4]))[1].any()
