import pytest

from netsum.host_agent.settings import Faults, Settings, parse_faults
from netsum.protocol.errors import UsageError


def test_nothing_set():
    assert Settings.from_environment({}) == Settings()


def test_all_set():
    settings = Settings.from_environment(
        {
            "NETSUM_SWITCH": "tcp://10.0.0.1:48800",
            "NETSUM_RENDEZVOUS": "10.0.0.2:5000",
            "MASTER_ADDR": "10.0.0.3",
            "MASTER_PORT": "29500",
            "NETSUM_SECRET": "s",
            "NETSUM_CONNECT_TIMEOUT_S": "0.5",
            "NETSUM_CHUNK_ELEMS": "256",
            "NETSUM_SLOTS": "64",
            "NETSUM_FAULTS": "loss=1%",
        }
    )
    assert settings == Settings(
        "tcp://10.0.0.1:48800", "10.0.0.2:5000", "10.0.0.3", "29500", "s", 0.5, 256, 64, Faults(loss=0.01)
    )


def test_faults():
    assert parse_faults("loss=1%, duplicate=5%,reorder=0.25,delay=0-20ms,corrupt=0%,seed=7") == Faults(
        seed=7, loss=0.01, duplicate=0.05, reorder=0.25, delay_min_us=0, delay_max_us=20_000, corrupt=0.0
    )
    assert parse_faults("delay=1.5ms") == Faults(delay_min_us=1500, delay_max_us=1500)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("NETSUM_FAULTS", "loss=150%"),
        ("NETSUM_FAULTS", "loss"),
        ("NETSUM_FAULTS", "jitter=3ms"),
        ("NETSUM_FAULTS", "delay=20-0ms"),
        ("NETSUM_FAULTS", "delay=20"),
        ("NETSUM_CHUNK_ELEMS", "100"),
        ("NETSUM_CHUNK_ELEMS", "many"),
        ("NETSUM_CONNECT_TIMEOUT_S", "0"),
    ],
)
def test_wrong_values_are_refused_by_name(variable, value):
    with pytest.raises(UsageError, match=variable):
        Settings.from_environment({variable: value})
