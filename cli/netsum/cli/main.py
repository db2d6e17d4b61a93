"""The command ``netsum``."""


def main() -> None:
    raise SystemExit("not built yet")
