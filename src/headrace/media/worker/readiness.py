"""Whether this machine can serve by its settings, seen before anything is opened.

What a setting alone tells is refused where it is read, by every command. What a file of this machine tells is looked at here,
by the node alone: machines of one site share one configuration. A disk that is away is no fault of settings: the
node serves without it.
"""

from __future__ import annotations

import stat

from headrace.kernel.config import InvalidConfig
from headrace.kernel.errors import FieldProblem
from headrace.media.cluster.membership import member_of
from headrace.media.model import DiskConfig, MediaConfig
from headrace.media.worker.channels import Certificate


def require_servable(config: MediaConfig) -> None:
    """Raises: InvalidConfig, with every problem at once; InvalidNode."""
    problems = [
        *_problems_of_tls(config),
        *(problem for disk in config.disks for problem in _problems_of_disk(disk)),
    ]
    if problems:
        lines = "; ".join(f"{one.pointer}: {one.text}" for one in problems)
        raise InvalidConfig(f"configuration: {lines}", problems=tuple(problems))
    # A port that the kernel chooses is known once the node listens.
    if config.node is not None and (config.advertise or config.listen[1]):
        member_of(config, config.listen)


def _problems_of_tls(config: MediaConfig) -> list[FieldProblem]:
    if config.listen_tls is None:
        return []
    if config.tls_cert is None:
        text = "expected a file with a certificate, since media.listen_tls is set, got none"
        return [FieldProblem("media.tls_cert", "missing", text)]
    try:
        Certificate(config.tls_cert, config.tls_key)
    except OSError as error:  # ssl.SSLError is one
        files = f"{config.tls_cert} and {config.tls_key or 'no media.tls_key'}"
        why = error.strerror or str(error)
        text = f"expected a certificate and its private key, PEM, got {files}: {why}"
        return [FieldProblem("media.tls_cert", "invalid", text)]
    return []


def _problems_of_disk(disk: DiskConfig) -> list[FieldProblem]:
    try:
        mode = disk.path.stat().st_mode
    except OSError:
        return []
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        return []
    text = f"expected a folder or a block device, got {disk.path}, which is neither"
    return [FieldProblem("media.disks", "invalid", text)]
