"""The launch policy: the settings a run starts with, where each value came from, and what in the environment contradicts them.

:func:`resolve` makes a :class:`LaunchPolicy` from a :class:`~megacpp_mcore.model.run.Run`, whose settings are the file that
``MEGACPP_CONFIG`` names, and the environment. It combines the values (:mod:`megacpp_mcore.policy.values`) and the overlap
contract (:mod:`megacpp_mcore.policy.overlap`).

The launcher prints the policy once and sets :meth:`LaunchPolicy.environment`. A Megatron-Bridge recipe does the same, and its
variables and arguments have the source ``recipe``. For a script that was started without the
launcher, its spec prints the policy as it really is (:func:`announce`): with nothing set. No torch here.
"""

from megacpp_mcore.policy.gpu_memory import check_memory, mamba_keeps
from megacpp_mcore.policy.launch import COMPILED, LaunchPolicy, active, announce, announced, resolve
from megacpp_mcore.policy.overlap import CONNECTIONS, overlap_contract
from megacpp_mcore.policy.values import ALLOCATOR, DEFAULT, RECIPE, USER, Value, tf32_products

__all__ = [
    "ALLOCATOR",
    "COMPILED",
    "CONNECTIONS",
    "DEFAULT",
    "RECIPE",
    "USER",
    "LaunchPolicy",
    "Value",
    "active",
    "announce",
    "announced",
    "check_memory",
    "mamba_keeps",
    "overlap_contract",
    "resolve",
    "tf32_products",
]
