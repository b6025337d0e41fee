"""The HTTPS gateway: machines outside the cluster, which can only make outbound connections, take part in a run through it.

The service does the work. This room adds what a network needs: authentication, checks of messages, and transfers that continue
after an interruption. Nothing from outside is unpickled: messages are JSON, tensors are safetensors.
"""

from importlib.util import find_spec

from heloco.errors import UserError


def check_parts(*names: str) -> None:
    if missing_modules := [name for name in names if find_spec(name) is None]:
        raise UserError(f'The HTTPS gateway needs {" and ".join(missing_modules)}: pip install "heloco[cluster]"')
