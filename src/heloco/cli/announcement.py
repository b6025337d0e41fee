"""What `heloco serve` prints about its run: how to join it, to look at it and to control it, and how to go on with it."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heloco.cli.serve import Engine
    from heloco.cluster.server.process import ServeSpec


def announce(engine: "Engine", spec: "ServeSpec", ray: str) -> None:
    """Prints how machines join, look at and control the run. Prints nothing without a gateway."""
    if not engine.address:
        return
    from heloco.cluster.protocol.tokens import parse_token

    address, worker = reachable(engine.address, spec), engine.token("worker")
    if is_external(spec):
        print(f"In training scripts:  HELOCO_ADDRESS={address} HELOCO_TOKEN={worker}", flush=True)
    else:
        print(f"On other machines:  HELOCO_TOKEN={worker} heloco join {address}", flush=True)
        if ray not in ("auto", "off"):
            print(f"On Ray's nodes:     heloco join ray:{ray.removeprefix('ray:')}", flush=True)
    viewer = engine.token("viewer")
    print(f"To look at it:      HELOCO_TOKEN={viewer} heloco status {address}", flush=True)
    if spec.listen and not spec.listen.page:
        print('Live page:          needs plotly and jinja2: pip install "heloco[report]"', flush=True)
    elif spec.listen:
        token = parse_token(viewer)
        print(f"Live page:          {address}/page?key={token.secret}", flush=True)
        if not spec.listen.cert:
            print(certificate_note(token.fingerprint), flush=True)
    print(f"To control it:      heloco stop {spec.folder} (also pause, unpause, evict, tokens, rollback)", flush=True)


def certificate_note(fingerprint: str) -> str:
    """Why a browser warns about the page of a run with a certificate of its own, and what to compare before going on."""
    pairs = ":".join(fingerprint[i : i + 2] for i in range(0, len(fingerprint), 2)).upper()
    return (
        "    The browser will warn, because the run made its certificate itself and no authority has signed it. The connection\n"
        "    is encrypted all the same. Go on if the certificate that the browser shows has this SHA-256 fingerprint:\n"
        f"    {pairs}"
    )


def is_external(spec: "ServeSpec") -> bool:
    """Whether training scripts bring the model of the run. Then `heloco join` cannot train it."""
    from heloco.records.config_facts import parse_config, read_config
    from heloco.records.run_files import CONFIG

    config = parse_config(spec.config, "the run's config") if spec.config else read_config(Path(spec.folder) / CONFIG)
    return config.input.task == "external"


def reachable(address: str, spec: "ServeSpec") -> str:
    """The gateway's address with a host name that others can use."""
    if spec.listen is None or not spec.listen.names:
        return address
    name = spec.listen.names[0]
    return f"https://{f'[{name}]' if ':' in name else name}:{address.rpartition(':')[2]}"


def how_to_go_on(spec: "ServeSpec", *, is_stopped: bool) -> str:
    """What a person reads at the end of serving: what machines do now, and the command that continues the run."""
    goes_on = f"`heloco serve {spec.folder}` goes on."
    if spec.for_restart() is spec and spec.config:
        goes_on = f"No machine had brought a model: the same command with --out {spec.folder} starts again."
    if is_stopped:
        return f"Stopped for all machines, and saved. {goes_on}"
    return f"Suspended and saved: machines keep their rounds and wait for it. {goes_on}"
