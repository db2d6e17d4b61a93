"""Proof that an agent knows the switch's secret, without a memory of who was asked."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from enum import Enum

NONCE_BYTES = 16
NONCE_LIFETIME_US = 30_000_000


class Proof(Enum):
    VALID = "valid"
    MISSING = "missing"
    WRONG = "wrong"


class Challenger:
    """Nonces are a keyed hash of the asker's return address and the time window, so a flood of askers occupies no memory.

    A nonce is good for its window of 30 s and the next one. Without a secret everybody is welcome.
    """

    def __init__(self, secret: str | None, key: bytes) -> None:
        self.secret = secret
        self._key = key

    def nonce(self, identity: bytes, now_us: int) -> bytes:
        """What ``identity`` has to prove its knowledge with, now."""
        return self._nonce(identity, now_us // NONCE_LIFETIME_US)

    def check(self, identity: bytes, proof: bytes, make_proof: Callable[[str, bytes], bytes], now_us: int) -> Proof:
        """``make_proof(secret, nonce)`` gives the right proof; compared in constant time."""
        if self.secret is None:
            return Proof.VALID
        if not proof:
            return Proof.MISSING
        window = now_us // NONCE_LIFETIME_US
        for candidate in (window, window - 1):
            if hmac.compare_digest(proof, make_proof(self.secret, self._nonce(identity, candidate))):
                return Proof.VALID
        return Proof.WRONG

    def _nonce(self, identity: bytes, window: int) -> bytes:
        text = window.to_bytes(8, "big", signed=True) + identity
        return hmac.new(self._key, text, hashlib.sha256).digest()[:NONCE_BYTES]
