"""Every JSON document that crosses SSH, as plain frozen dataclasses.

Both planes import this package and nothing else of each other's; ``wire`` says how a document is
written and what is refused. Units: bytes, seconds, tokens; times are unix seconds. Layer ids: k is
the residual stream that enters block k, counted from 0 (Hugging Face ``hidden_states[k]``).
"""

from hsx_host.contract.borrowing import *  # noqa: F403
from hsx_host.contract.data import *  # noqa: F403
from hsx_host.contract.told import *  # noqa: F403
from hsx_host.wire import ContractError, decode, encode, from_dict, to_dict

__all__ = ["ContractError", "decode", "encode", "from_dict", "to_dict"]
