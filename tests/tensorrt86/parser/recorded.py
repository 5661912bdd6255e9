"""Writes the part of the stand-in network that says nothing of its own, from TensorRT's public headers.

    python recorded.py NvInferImpl.h recorded.h

TensorRT's interfaces forward to abstract classes ``apiv::V...``, which the builder implements. For each that a network
is made of, a class ``Recorded<apiv::V...>`` is written: a setter of one value keeps it, its getter gives it back, and
every other function ends the program by naming itself, so that what the stand-in lacks is neither guessed nor a crash.
"""

import re
import sys
from pathlib import Path

CLASSES = re.compile(r"^class (V\w+) : public VRoot\n\{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
FUNCTIONS = re.compile(r"virtual\s+([\w:&*\s]+?)\s*\b(\w+)\(([^()]*)\)\s*(const)?\s*noexcept\s*=\s*0;")
OTHERS = ("VTensor", "VNetworkDefinition", "VLoop", "VBuilder")
"""What a network is made of beside layers."""


def types(parameters: str) -> list[str]:
    """The types of a list of parameters, without names and defaults."""
    plain = (re.sub(r"\s*=.*", "", one).strip() for one in parameters.split(",") if one.strip())
    return [re.sub(r"\s*\b\w+$", "", one) for one in plain]


def recorded(name: str, body: str) -> str:
    """The class for one of the abstract ones."""
    functions = [(" ".join(given.split()), *rest) for given, *rest in FUNCTIONS.findall(body)]
    kept = {}
    for given, function, parameters, const in functions:
        taken = types(parameters)
        if given == "void" and function.startswith("set") and len(taken) == 1 and not const:
            getter = next((one for one in functions if one[1] == f"get{function[3:]}" and not types(one[2])), None)
            if getter is not None and getter[0] == taken[0]:
                kept[function[3:]] = "std::string" if taken[0] == "char const*" else re.sub(" const&$", "", taken[0])
    lines = [f"template <>\nclass Recorded<apiv::{name}> : public apiv::{name} {{\npublic:"]
    for given, function, parameters, const in functions:
        taken, value = types(parameters), function[3:]
        field = value[:1].lower() + value[1:]
        if value in kept and function.startswith("set"):
            does = f"{{ this->{field} = given; changed(); }}"
            listed = f"{taken[0]} given"
        elif value in kept and function.startswith("get"):
            does = f"{{ return this->{field}{'.c_str()' if kept[value] == 'std::string' else ''}; }}"
            listed = ""
        else:
            does = f'{{ lacks("{name}::{function}"); }}'
            listed = ", ".join(taken)
        lines.append(f"    {given} {function}({listed}) {const + ' ' if const else ''}noexcept override {does}")
    lines += [f"    {kind} {value[:1].lower() + value[1:]}{{}};" for value, kind in kept.items()]
    return "\n".join([*lines, "};"])


def main() -> None:
    header, output = (Path(word) for word in sys.argv[1:])
    # As it is written there a class may end with its own name in a comment.
    text = re.sub(r"^\}; // class \w+$", "};", header.read_text(), flags=re.MULTILINE)
    found = CLASSES.findall(text)
    written = [recorded(name, body) for name, body in found if name.endswith("Layer") or name in OTHERS]
    output.write_text("\n\n".join(written) + "\n")


if __name__ == "__main__":
    main()
