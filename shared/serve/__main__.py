"""Serve the four stages as four models of one OpenAI server: `python -m shared.serve`."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from collections.abc import Sequence

from shared.programs.cli import add_engine_options, engine_options
from shared.programs.options import number, whole
from shared.programs.program import Parser, finish, log_to_stderr
from shared.stages import STAGES, load_stage

logger = logging.getLogger("mini_vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Returns:
        The exit code: 0; 1 if something failed; 2 if the command line is wrong.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    args.stages = sorted(set(args.stages))
    options = {}
    try:
        for stage in args.stages:
            config_class = load_stage(stage).EngineConfig
            options[stage] = engine_options(args, config_class)
            config_class(**options[stage])
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return finish(lambda: run(args, options))


def build_parser() -> Parser:
    """The server's options, and those of the engines."""
    parser = Parser(
        prog="python -m shared.serve",
        description="Serve the stages as the models stage-01 to stage-04 of one OpenAI server.",
    )
    parser.add_argument("--model", default="smollm2", help="a name, a hub name or a folder")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument(
        "--stages",
        type=int,
        nargs="+",
        choices=list(STAGES),
        default=list(STAGES),
        help="default: all",
    )
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    parser.add_argument(
        "--port", type=whole(0, 65535), default=8000, help="0 is any that is free (default 8000)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("MINI_VLLM_API_KEY"),
        help="clients must send it; safer in the environment, as MINI_VLLM_API_KEY",
    )
    parser.add_argument(
        "--max-waiting",
        type=whole(1, 100_000),
        default=256,
        help="a stage with so many waiting completions answers 429 (default 256)",
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="let web pages of this origin call; may be repeated",
    )
    parser.add_argument(
        "--grace-period",
        type=number(0, 3600),
        default=10.0,
        metavar="SECONDS",
        help="that requests under way have to end after SIGTERM (default 10)",
    )
    add_engine_options(parser, load_stage(max(STAGES)).EngineConfig)
    return parser


def run(args: argparse.Namespace, options: dict[int, dict[str, object]]) -> int:
    """Load, listen, serve."""
    from transformers.utils.logging import disable_progress_bar

    from shared.models import load_model

    try:
        from .app import create_app
        from .driver import Driver
        from .metrics import Metrics
        from .server import bind, make_engines
        from .server import run as run_server
    except ModuleNotFoundError as error:
        raise ImportError(f"{error}: make serve installs what a server needs") from error

    # 1. The address first: a port in use is told at once.
    log_to_stderr(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # It tells of stop strings, which are a client's words and do not belong in a log.
    logging.getLogger("shared.engine.prompts").setLevel(logging.ERROR)
    sock = bind(args.host, args.port)

    # 2. One copy of the weights, and an engine for each stage.
    disable_progress_bar()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype)
    engines = make_engines(loaded, args.stages, options)
    metrics = Metrics(engines)
    driver = Driver(engines, args.max_waiting, metrics)
    app = create_app(
        driver,
        loaded.tokenizer,
        metrics,
        api_key=args.api_key or None,
        allow_origins=args.allow_origin,
        model_root=args.model,
    )

    # 3. Serve.
    def tell() -> None:
        host, port = sock.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"http://{address}:{port}  {', '.join(engines)}", flush=True)
        if ipaddress.ip_address(host).is_loopback:
            print("Only this machine can connect; --host 0.0.0.0 lets others in.", flush=True)
        elif not args.api_key:
            logger.warning("everybody who reaches this machine can use the server: give --api-key")

    return run_server(app, driver, sock, args.grace_period, tell)


if __name__ == "__main__":
    sys.exit(main())
