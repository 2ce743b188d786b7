"""The test cluster by hand: `make cluster` runs `up`, `make cluster-down` runs `down`.

cli.py up [--nodes 5] [--bare]    start it, with our images on every node unless --bare
cli.py status                     its nodes and how to talk to it
cli.py kubectl WORDS...           kubectl as administrator
cli.py helm WORDS...              helm as administrator
cli.py images                     build the images and load them
cli.py load ARCHIVE...            load OCI archives
cli.py kill|boot NODE             cut a node's power, give it back
cli.py partition|heal NODE        cut a node off the network, reconnect it
cli.py logs                       gather logs, objects and events
cli.py down                       end it
cli.py build                      only compile and build what the cache does not have
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import binaries
import images
import slots
from cluster import Cluster
from directions import directions
from machine import ClusterError, require

_NODE_COMMANDS = {
    "kill": Cluster.kill_node,
    "boot": Cluster.boot_node,
    "partition": Cluster.partition,
    "heal": Cluster.heal,
}


def main() -> int:
    """Do what the command line says; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage="%(prog)s"
    )
    simple = ["up", "status", "kubectl", "helm", "images", "load", "logs", "down", "build"]
    parser.add_argument("command", choices=[*simple, *_NODE_COMMANDS])
    parser.add_argument("words", nargs=argparse.REMAINDER)
    options, rest = parser.parse_known_args()
    try:
        return _run(options.command, [*options.words, *rest])
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1


def _run(command: str, words: list[str]) -> int:
    match command:
        case "build":
            require()
            binaries.build()
            images.build()
        case "up":
            _up(words)
        case "down":
            _down()
        case "kubectl" | "helm":
            cluster = Cluster.running()
            program = cluster.binaries.find(command)
            os.execv(program, [command, "--kubeconfig", str(cluster.kubeconfig), *words])
        case "status":
            print(Cluster.running().kubectl("get", "nodes", "-o", "wide"))
            print(directions(Cluster.running()))
        case "images":
            Cluster.running().load_image(images.build())
        case "load":
            Cluster.running().load_image(*(Path(word).resolve() for word in words))
        case "logs":
            print(Cluster.running().collect_logs("by-hand"))
        case _:
            for node in words:
                _NODE_COMMANDS[command](Cluster.running(), node)
    return 0


def _up(words: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="up")
    parser.add_argument("--nodes", type=int, default=5)
    parser.add_argument("--bare", action="store_true", help="without our images")
    options = parser.parse_args(words)
    cluster = Cluster(options.nodes, slot=slots.PERSONS_SLOT)
    with ThreadPoolExecutor(1) as pool:
        built = None if options.bare else pool.submit(images.build)
        cluster.start()
        if built is not None:
            cluster.load_image(built.result())
    print(cluster.kubectl("get", "nodes", "-o", "wide"))
    print(directions(cluster))


def _down() -> None:
    require()
    Cluster(1, slot=slots.PERSONS_SLOT).stop()


if __name__ == "__main__":
    sys.exit(main())
