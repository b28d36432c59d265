"""`completion`: print a shell script that completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

# `words` lists, for each command line typed so far (without options), the words that may follow.
_BASH = """\
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
_FISH = """\
function __penstock_words
    set -l line penstock
    for word in (commandline -opc)[2..]
        contains -- "$line $word" $__penstock_lines; and set line "$line $word"
    end
    switch $line
{cases}
    end
end
set -g __penstock_lines {lines}
complete -c penstock -a '(__penstock_words)'
"""
_ZSH = """\
#compdef penstock
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit }}
typeset -gA _penstock_words=(
{words}
)
_penstock() {{
    local line=penstock word
    for word in ${{words[2,CURRENT-1]}}; do
        (( ${{+_penstock_words[$line $word]}} )) && line+=" $word"
    done
    compadd -- ${{=_penstock_words[$line]}} || _files
}}
compdef _penstock penstock
"""


def register(commands: Any) -> None:
    about = "print a script that completes commands in a shell"
    parser = commands.add_parser(
        "completion",
        help=about,
        description=f'{about.capitalize()}. In bash and zsh: eval "$(penstock completion bash)", with the name of the shell. '
        "In fish: penstock completion fish | source",
    )
    parser.add_argument("shell", choices=tuple(_SCRIPTS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    lines = dict(_lines("penstock", _whole_parser()))
    print(_SCRIPTS[args.shell](lines), end="")
    return 0


def _bash(lines: Mapping[str, str]) -> str:
    return _BASH.format(words="\n".join(f'    ["{line}"]="{words}"' for line, words in lines.items()))


def _zsh(lines: Mapping[str, str]) -> str:
    return _ZSH.format(words="\n".join(f"    '{line}' '{words}'" for line, words in lines.items()))


def _fish(lines: Mapping[str, str]) -> str:
    cases = "\n".join(
        f"        case '{line}'\n            string split ' ' -- '{words}'" for line, words in lines.items()
    )
    return _FISH.format(cases=cases, lines=" ".join(f"'{line}'" for line in lines))


_SCRIPTS = {"bash": _bash, "zsh": _zsh, "fish": _fish}


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
