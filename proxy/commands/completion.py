"""`completion`: print a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import Any

# `words` lists, for each command line typed so far (without options), the words that may follow.
_SCRIPT = """\
_penstock() {{
    local line=penstock word
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $word == -* ]] || [[ -z ${{_penstock_words["$line $word"]+known}} ]] || line+=" $word"
    done
    COMPREPLY=($(compgen -o default -W "${{_penstock_words["$line"]}}" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
declare -gA _penstock_words=(
{words}
)
complete -o default -F _penstock penstock
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def register(commands: Any) -> None:
    about = "print a script that completes commands in a shell"
    parser = commands.add_parser("completion", help=about, description=f'{about}: eval "$(penstock completion bash)"')
    parser.add_argument("shell", choices=("bash", "zsh"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    words = "\n".join(f'    ["{line}"]="{following}"' for line, following in _lines("penstock", _whole_parser()))
    print((_ZSH if args.shell == "zsh" else "") + _SCRIPT.format(words=words), end="")
    return 0


def _whole_parser() -> argparse.ArgumentParser:
    """A parser with every command. The command line itself loads only the one that it runs."""
    from proxy.__main__ import COMMANDS

    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    for module in COMMANDS.values():
        import_module(f"proxy.commands.{module}").register(commands)
    return parser


def _lines(line: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Each command line, and the words that may follow it. Commands without a help text are internal."""
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if isinstance(action, argparse._SubParsersAction):
            shown = [choice.dest for choice in action._choices_actions]
            words += shown
            for name in shown:
                yield from _lines(f"{line} {name}", action.choices[name])
        elif action.choices and not action.option_strings:
            words += map(str, action.choices)
    yield line, " ".join(words)
