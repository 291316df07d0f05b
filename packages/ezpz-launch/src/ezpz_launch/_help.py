"""The page that ``ezpz-launch --help`` prints."""

from __future__ import annotations

from ._argv import OPTIONS

USAGE = "ezpz-launch [OPTION...] [--] COMMAND [ARGUMENT...]"

EXAMPLES = (
    ("ezpz-launch python train.py --lr 1e-4", "one rank a device of this job, or host"),
    ("ezpz-launch -n 2 -m ezpz.examples.minimal", "two ranks of a module"),
    ("ezpz-launch --dry-run --machine aurora -N 4 python train.py", "what would be run, and why"),
    ("ezpz-launch --idle-timeout 10m --retries 3 python train.py", "stacks of a hang; start again"),
    ("ezpz-launch history", "the launches so far"),
)


def help_page() -> str:
    """Return the page."""
    lines = [f"usage: {USAGE}", "", "Start COMMAND on every rank; its words are not touched.", ""]
    lines.append("options:")
    for option in OPTIONS:
        flags = ", ".join([*([f"-{option.short}"] if option.short else []), f"--{option.name}"])
        lines.append(f"  {f'{flags} {option.value}'.rstrip():<24} {option.help}")
    lines += ["", "examples:"]
    lines += [f"  {words:<59} {what}" for words, what in EXAMPLES]
    lines += [
        "",
        "exit status: 0; that of the first rank that failed (128 + signal if it was killed; 75:",
        "check-pointed, requeue); 2 usage; 124 hang; 126, 127 the command cannot be executed or",
        "found; 130 Ctrl-C; 143 SIGTERM.",
    ]
    return "\n".join(lines)
