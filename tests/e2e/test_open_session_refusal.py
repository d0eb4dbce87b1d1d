"""A session that does not fit is refused with the settings that would help, and each of them does."""

import pytest
from sluice_client import Client, CloseMode, ResourceExhaustedError

BUDGET_BYTES = 160 << 20
# A_g alone is 8 x 4,096 x 4 x 16 x 64 x 2 bytes = 256 MiB.
SPEC = dict(name="large", num_layers=8, num_query_heads=8, num_kv_heads=4, head_dim=128, block_tokens=16, rank=64,
            max_blocks=4096, max_sequences=8)
A_G_BYTES = 8 * 4096 * 4 * 16 * 64 * 2


@pytest.fixture
def small(start_daemon):
    with Client(start_daemon(f"--hbm_budget_bytes={BUDGET_BYTES}").address) as client:
        yield client


def refusal(client, **changes):
    """The refusal of a session; nothing of it stays."""
    before = client.get_usage()
    with pytest.raises(ResourceExhaustedError) as caught:
        client.open_session(**{**SPEC, **changes})
    assert caught.value.reason == "DEVICE_MEMORY"
    assert client.get_usage().memory == before.memory and client.list_sessions() == []
    return caught.value


def fits(client, **changes):
    session = client.open_session(**{**SPEC, **changes})
    session.close(CloseMode.DELETE_DATA)


def test_a_refusal_has_the_numbers(small):
    error = refusal(small)
    need_bytes, free_bytes = int(error.metadata["need_bytes"]), int(error.metadata["free_bytes"])
    assert need_bytes > A_G_BYTES and 0.9 * BUDGET_BYTES < free_bytes <= BUDGET_BYTES
    for number in ("8", "4096", "4", "16", "64", str(A_G_BYTES)):
        assert number in error.metadata["a_g_formula"].split()
    for part in (str(need_bytes), str(free_bytes), error.metadata["a_g_formula"]):
        assert part in error.message


def test_the_named_rank_fits_and_one_more_does_not(small):
    rank = int(refusal(small).metadata["fits_rank"])
    assert 1 <= rank < SPEC["rank"]
    fits(small, rank=rank)
    refusal(small, rank=rank + 1)


def test_the_named_number_of_blocks_fits_and_one_more_does_not(small):
    max_blocks = int(refusal(small).metadata["fits_max_blocks"])
    assert 1 <= max_blocks < SPEC["max_blocks"]
    fits(small, max_blocks=max_blocks)
    refusal(small, max_blocks=max_blocks + 1)


def test_the_named_budget_fits_and_one_byte_less_does_not(small, start_daemon):
    budget_bytes = int(refusal(small).metadata["fits_hbm_budget_bytes"])
    assert budget_bytes > BUDGET_BYTES
    with Client(start_daemon(f"--hbm_budget_bytes={budget_bytes}").address) as client:
        fits(client)
    with Client(start_daemon(f"--hbm_budget_bytes={budget_bytes - 1}").address) as client:
        error = refusal(client)
        assert int(error.metadata["fits_hbm_budget_bytes"]) == budget_bytes


def test_what_others_use_counts(small):
    alone = int(refusal(small).metadata["fits_max_blocks"])
    other = small.open_session(**{**SPEC, "name": "other", "max_blocks": alone // 4})
    with pytest.raises(ResourceExhaustedError) as caught:
        small.open_session(**SPEC)
    rest = caught.value.metadata
    if "fits_max_blocks" in rest:
        blocks = int(rest["fits_max_blocks"])
        assert blocks < alone
        small.open_session(**{**SPEC, "max_blocks": blocks}).close(CloseMode.DELETE_DATA)
        with pytest.raises(ResourceExhaustedError):
            small.open_session(**{**SPEC, "max_blocks": blocks + 1})
    else:
        with pytest.raises(ResourceExhaustedError):
            small.open_session(**{**SPEC, "max_blocks": 1})
    other.close(CloseMode.DELETE_DATA)
    fits(small, max_blocks=alone)


def test_where_nothing_helps_it_says_so(start_daemon):
    with Client(start_daemon("--hbm_budget_bytes=65536").address) as client:
        error = refusal(client, max_sequences=65536)
        assert "fits_rank" not in error.metadata and "fits_max_blocks" not in error.metadata
        with pytest.raises(ResourceExhaustedError):
            client.open_session(**{**SPEC, "max_sequences": 65536, "rank": 1})
        with pytest.raises(ResourceExhaustedError):
            client.open_session(**{**SPEC, "max_sequences": 65536, "max_blocks": 1})


def test_the_largest_geometry_is_refused_without_overflow(small):
    error = refusal(small, num_layers=1024, num_query_heads=1024, num_kv_heads=256, head_dim=256, block_tokens=256,
                    rank=128, max_blocks=1 << 24, max_sequences=65536)
    assert int(error.metadata["need_bytes"]) > 1024 * (1 << 24) * 256 * 256 * 128 * 2
