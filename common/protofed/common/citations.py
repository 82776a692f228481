"""Names and papers of the methods, for reports and model cards: without torch, which the methods themselves need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Paper:
    """A method's name in prose and its paper, as in the README's table; `source` is empty where there is none."""

    title: str
    source: str = ""

    @property
    def cited(self) -> str:
        """The name with its citation, as `FedNH (Dai et al., AAAI 2023)`."""
        return f"{self.title} ({self.source})" if self.source else self.title


PAPERS: Mapping[str, Paper] = {
    "fednh": Paper("FedNH", "Dai et al., AAAI 2023"),
    "fedprp": Paper("FedPRP", "Guo et al., TNNLS 2024"),
    "fedproc": Paper("FedProc", "Mu et al., 2021"),
    "cwfedavg": Paper("cwFedAVG", "Lee and Choi, arXiv 2406.07800v1"),
    "cwfedavg-private": Paper("cwFedAVG, mixed by the sites", "after Lee and Choi, arXiv 2406.07800v1"),
    "fedavg": Paper("FedAvg", "McMahan et al., AISTATS 2017"),
    "fedavgm": Paper("FedAvgM", "Hsu et al., 2019"),
    "fedadam": Paper("FedAdam", "Reddi et al., ICLR 2021"),
    "fedyogi": Paper("FedYogi", "Reddi et al., ICLR 2021"),
    "ditto": Paper("Ditto", "Li et al., ICML 2021"),
    "fedprox": Paper("FedProx", "Li et al., MLSys 2020"),
    "moon": Paper("MOON", "Li et al., CVPR 2021"),
    "fedper": Paper("FedPer", "Arivazhagan et al., 2019"),
    "fedrep": Paper("FedRep", "Collins et al., ICML 2021"),
    "fedbabu": Paper("FedBABU", "Oh et al., ICLR 2022"),
    "fedrod": Paper("FedROD", "Chen and Chao, ICLR 2022"),
    "fedproto": Paper("FedProto", "Tan et al., AAAI 2022"),
    "solo": Paper("training alone"),
}


def paper(method: str) -> Paper:
    """The name and paper of a method; for a plug-in's, its name in the recipe alone."""
    return PAPERS.get(method, Paper(method))
