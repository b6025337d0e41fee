"""The HTTPS gateway: machines outside the cluster, which can only make outbound connections, take part in a run through it.

The service does everything; here is only what a network needs: who may come in, what a message must look like, bytes that go on
where they were cut. Nothing from outside is unpickled: messages are JSON, tensors are safetensors.
"""

from importlib.util import find_spec

from heloco.errors import UserError


def check_parts(*names: str) -> None:
    if missing := [name for name in names if find_spec(name) is None]:
        raise UserError(f'The HTTPS gateway needs {" and ".join(missing)}: pip install "heloco[cluster]"')
