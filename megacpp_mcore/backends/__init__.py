"""Backends of every op: candidates, requests, observed choices and their reasons.

==========================  ==========================================================================================
module                     content
==========================  ==========================================================================================
:mod:`~.support`           what a candidate supports, as data
:mod:`~.architectures`     launch options and fitting kernels by GPU architecture, as data
:mod:`~.vendor_switches`   which other packages' kernels the configuration file allows
:mod:`~.probes`            what works on this machine: Transformer Engine, Triton, Apex, each probed once per process
:mod:`~.candidate`         one implementation of one op
:mod:`~.dispatcher`        chooses among candidates and records the choices
:mod:`~.candidates`        the implementations in this package, and those of the layers' linears, norms and experts
:mod:`~.observed`          what patches actually ran instead of stock
:mod:`~.built`             what the modules of a built model and its optimizer run
:mod:`~.markdown`          all of it as a table (``megacpp-mcore doctor --backends``)
==========================  ==========================================================================================

None of these imports torch before something is probed or chosen.
"""

from __future__ import annotations

from megacpp_mcore.backends.candidate import STOCK, Candidate, Speed
from megacpp_mcore.backends.candidates import own_candidates
from megacpp_mcore.backends.dispatcher import AUTO, Dispatcher, Resolution
from megacpp_mcore.backends.probes import APEX_PARTS, ProbeResult, apex_parts, probe_import, te_disabled
from megacpp_mcore.backends.support import Dim, Support

__all__ = [
    "APEX_PARTS",
    "AUTO",
    "STOCK",
    "Candidate",
    "Dim",
    "Dispatcher",
    "ProbeResult",
    "Resolution",
    "Speed",
    "Support",
    "apex_parts",
    "own_candidates",
    "probe_import",
    "te_disabled",
]
