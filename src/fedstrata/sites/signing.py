"""Signatures of masked sums: a site signs with its registered key, and knows those of the other sites by itself.

What a server says of the others' keys is worth nothing: it could play them. So every site has their public keys
in its own folder, from whoever set up the federation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedstrata.client.setup import Ready
from fedstrata.client.sum_rules import agreed_on
from fedstrata.errors import UserError
from fedstrata.exchanges.exchange import SumSigning
from fedstrata.models.parts import part_tensors
from fedstrata.privacy.sum_terms import SIGNATURE_BYTES
from fedstrata.server.state import fingerprint
from fedstrata.sites.remote_run import run_id
from fedstrata.sites.settings import ServerSettings, SiteSettings
from fedstrata.wire.codec import WireError

HALF = SIGNATURE_BYTES // 2


@dataclass(frozen=True)
class KeySigner:
    """ECDSA over SHA-384 with the sites' registered keys.

    Attributes:
        peers: site -> its public key.
        key: the own private key; None at the server, which signs nothing.
    """

    peers: Mapping[str, Any]
    key: Any = None

    def sign(self, content: bytes) -> bytes:
        """See :class:`fedstrata.privacy.sum_terms.Signer`."""
        r, s = decode_dss_signature(self.key.sign(content, ec.ECDSA(SHA384())))
        return bytes(r.to_bytes(HALF, "big") + s.to_bytes(HALF, "big"))

    def check(self, name: str, content: bytes, signature: bytes) -> None:
        """See :class:`fedstrata.privacy.sum_terms.Signer`."""
        if name not in self.peers:
            raise WireError(
                f"masked sum: the key of {name!r} is not known here; the folder 'peers' of this "
                "site needs it, from whoever made it and not from the server"
            )
        r, s = (int.from_bytes(half, "big") for half in (signature[:HALF], signature[HALF:]))
        try:
            self.peers[name].verify(encode_dss_signature(r, s), content, ec.ECDSA(SHA384()))
        except InvalidSignature:
            raise WireError(f"masked sum: what came as {name!r} is not signed with its registered key") from None


def site_signer(key: Path, peers: Path | None) -> KeySigner:
    """A site's signer.

    Args:
        key: its private key.
        peers: the folder with every site's public key, ``NAME.pub``.

    Raises:
        UserError: a key cannot be used.
    """
    known = {} if peers is None else {path.stem: path for path in sorted(peers.glob("*.pub"))}
    try:
        return KeySigner(_public(known), load_ssh_private_key(key.read_bytes(), None))
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UserError(f"{key}: cannot sign ({error}); expected ECDSA in OpenSSH's form") from None


def with_signer(ready: Ready, settings: SiteSettings, run: str, job: str) -> Ready:
    """A site's model and examples, with what it signs masked sums of a run with.

    Args:
        ready: examples, and the model as the run starts from it.
        settings: the site's.
        run: the run's name.
        job: digest of the job as the site was told it.
    """
    if ready.runtime.sums is None:
        return ready
    signer, loaded = site_signer(settings.key, settings.peers), ready.loaded
    start = {part: part_tensors(loaded.model, loaded.parts, [part]) for part in loaded.parts.names}
    agreement = agreed_on(job, fingerprint(start))
    rules = replace(ready.runtime.sums, run=run.encode(), agreement=agreement, signer=signer)
    return replace(ready, runtime=replace(ready.runtime, sums=rules))


def remote_signing(rules: SumSigning, folder: Path, settings: ServerSettings) -> SumSigning:
    """The same with what the server of a federation checks the sites' signatures against."""
    return replace(rules, run=run_id(folder).encode(), signer=KeySigner(_public(settings.sites)))


def _public(paths: Mapping[str, Path]) -> dict[str, Any]:
    keys = {}
    for name, path in paths.items():
        try:
            keys[name] = load_ssh_public_key(path.read_bytes())
        except (ValueError, UnsupportedAlgorithm) as error:
            raise UserError(f"{path}: is no public key of a site ({error})") from None
    return keys
