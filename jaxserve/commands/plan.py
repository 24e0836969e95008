"""jaxserve plan."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="what `jaxserve compile` takes, or a config.json without weights")
    parser.add_argument("--target", default="h100-sxm", help="the GPU (default h100-sxm)")
    parser.add_argument("--recipe", action="append", help="a recipe to look at; may be repeated (default: several)")
    parser.add_argument("--batch", default="1,8,64,256", help="sequences that decode at once (default 1,8,64,256)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each sequence (default 2048)")
    parser.add_argument("--price", type=float, help="price of an hour of the card: adds the cost of a million tokens")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")


def _batches(text: str) -> list[int]:
    from jaxserve.errors import UserError

    try:
        batches = [int(number) for number in text.split(",")]
    except ValueError:
        batches = [0]
    if min(batches) < 1:
        raise UserError(f"--batch {text!r} is not a list of positive numbers, such as 1,8,64")
    return batches


def run(options: argparse.Namespace) -> int:
    import json

    from jaxserve import sizing
    from jaxserve.errors import UserError
    from jaxserve.targets import GPUS, Gpu, find_target

    gpu = find_target(options.target)
    if not isinstance(gpu, Gpu):
        raise UserError(f"--target {options.target}: ceilings are known of {', '.join(GPUS)}")
    config, stored = sizing.read_model(options.model)
    if not 1 <= options.context <= config.max_positions:
        raise UserError(f"--context {options.context} is not between 1 and {config.max_positions}, the model's limit")
    if options.price is not None and options.price <= 0:
        raise UserError(f"--price {options.price:g} is not above 0")
    recipes = options.recipe or (*sizing.RECIPES, *(("native",) if stored else ()))
    sizings = sizing.size_model(config, stored, recipes, gpu, _batches(options.batch), options.context, options.price)
    if not sizings:
        raise UserError(f"--target {gpu.name} has no units for {', '.join(recipes)}")
    facts = sizing.to_json(sizings, gpu, options.context)
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts, gpu)
    return 0


def _show(facts, gpu) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(
        f"{gpu.name}: {gpu.memory_bytes / 1e9:.1f} GB at {gpu.bandwidth / 1e12:.2f} TB/s, "
        f"bf16 {gpu.rates['bf16'] / 1e12:.0f} TFLOP/s; contexts of {facts['context']} tokens"
    )
    first = facts["recipes"][0]["decode"]
    titles = [f"decode {each['batch']}" for each in first]
    table = Table("recipe", "weights", "KV/token", "batch ≤", *titles, "prefill", box=None, pad_edge=False)
    for recipe in facts["recipes"]:
        table.add_row(
            recipe["recipe"],
            f"{recipe['weight_bytes'] / 1e9:.2f} GB",
            f"{recipe['kv_bytes_per_token'] / 1e3:.1f} kB",
            str(recipe["largest_batch"]),
            *map(_decode, recipe["decode"]),
            _time(recipe["prefill"]),
        )
    console.print(table)
    if facts["recommended"]:
        console.print(f"fastest at the largest batch that fits: {facts['recommended']} (docs/accuracy.md: its errors)")
    else:
        console.print("nothing fits: ask for smaller batches or a shorter --context")
    console.print("Predicted from counted bytes and operations and the data sheet's ceilings; nothing was measured.")


def _decode(step) -> str:
    if not step["fits"]:
        return "too large"
    cost = step["cost_per_million_tokens"]
    return _time(step) + ("" if cost is None else f", {cost:.3g} a million")


def _time(step) -> str:
    return f"{step['seconds'] * 1e3:.2f} ms ({step['bound']})"
