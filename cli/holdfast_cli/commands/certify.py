"""`holdfast certificates`: makes a CA and its certificates, for a cluster or by hand."""

from __future__ import annotations

import argparse
import time
from datetime import timedelta

from holdfast_operator.control.certificates import Certificates
from holdfast_protos.connections.identity import Role


def run(options: argparse.Namespace) -> int:
    """Make certificates that are missing, or have used up a seventh of their lifetime."""
    life = timedelta(days=options.days)
    certificates = Certificates(options.out, domain=options.domain, life=life)
    certificates.make(time.time())
    for role in Role:
        folder = certificates.directory(role)
        print(f"{role}.{options.domain}.holdfast: {folder}")
    print(
        f"Keep {options.out}/ca.key secret: anyone who has it can pass for any daemon or operator."
    )
    return 0
