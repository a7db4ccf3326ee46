"""Settings of published private training, with known epsilons.

``rdp`` is the paper's epsilon, or was recomputed from its settings with Opacus's RDP accountant; ``prv`` is the upper
bound of Opacus's PRV accountant; ``pld`` was computed with dp-accounting before this project existed.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpvision.accounting import Charges
from dpvision.privacy.mechanism import Event


@dataclass(frozen=True)
class Setting:
    """One mechanism, and what is known about it."""

    source: str
    sample_rate: float
    noise_multiplier: float
    steps: int
    delta: float = 1e-5
    rdp: float | None = None
    prv: float | None = None
    pld: float | None = None

    @property
    def charges(self) -> Charges:
        return [(Event(sample_rate=self.sample_rate, noise_multiplier=self.noise_multiplier), self.steps)]

    def __str__(self) -> str:
        return f"{self.source}, q={self.sample_rate:.4g}, sigma={self.noise_multiplier:g}, T={self.steps}"


_SCALENORM = "Klause et al. 2022, ScaleNorm"
_SMOOTHNET = "Remerscheid et al. 2022, SmoothNet"
_SHOEFIT = "Papernot et al. 2019 and followers"
_SCALE = "De et al. 2022"
_OWN = "MNIST, Fashion, CIFAR-10 on two cores"

SETTINGS: tuple[Setting, ...] = (
    # CIFAR-10 (q = 1/49), ImageNette (1/10) and Tiny ImageNet (1/98), lot size 1024
    Setting(_SCALENORM, 1 / 49, 1.741, 50 * 49, rdp=2.89),
    Setting(_SCALENORM, 1 / 49, 1.694, 50 * 49, rdp=3),
    Setting(_SCALENORM, 1 / 49, 0.972, 50 * 49, rdp=7.42),
    Setting(_SCALENORM, 1 / 49, 0.852, 50 * 49, rdp=9.88),
    Setting(_SCALENORM, 1 / 49, 0.825, 25 * 49, rdp=7.5),
    Setting(_SCALENORM, 1 / 49, 1.150, 90 * 49, rdp=7.5),
    Setting(_SCALENORM, 1 / 49, 0.985, 90 * 49, rdp=10),
    Setting(_SCALENORM, 1 / 10, 3.596, 50 * 10, rdp=2.89),
    Setting(_SCALENORM, 1 / 10, 1.723, 50 * 10, rdp=7.42),
    Setting(_SCALENORM, 1 / 10, 1.421, 50 * 10, rdp=9.88),
    Setting(_SCALENORM, 1 / 98, 1.147, 90 * 98, rdp=5),
    Setting(_SCALENORM, 1 / 98, 0.814, 90 * 98, rdp=10),
    Setting(_SCALENORM, 1 / 98, 0.442, 90 * 98, rdp=70),
    # CIFAR-10 (40,000 pictures, batch 256) and ImageNette (7,576)
    Setting(_SMOOTHNET, 1 / 157, 0.840, 90 * 157, rdp=7),
    Setting(_SMOOTHNET, 1 / 157, 0.902, 120 * 157, rdp=7),
    Setting(_SMOOTHNET, 1 / 157, 1.013, 180 * 157, rdp=7),
    Setting(_SMOOTHNET, 1 / 30, 1.439, 90 * 30, rdp=7),
    Setting(_SMOOTHNET, 1 / 30, 1.608, 120 * 30, rdp=7),
    Setting(_SMOOTHNET, 1 / 30, 1.900, 180 * 30, rdp=7),
    # TF-Privacy's MNIST tutorial; Handcrafted-DP's three recipes; the transfer ladder at 400 epochs
    Setting(_SHOEFIT, 256 / 60000, 1.1, 14063, rdp=2.60),
    Setting(_SHOEFIT, 100 / 60000, 1.1, 24000),
    Setting(_SHOEFIT, 512 / 60000, 1.23, 4688),
    Setting(_SHOEFIT, 2048 / 60000, 2.15, 1172),
    Setting(_SHOEFIT, 1024 / 50000, 1.54, 1465),
    Setting(_SHOEFIT, 2000 / 50000, 9.50, 10000),
    # WRN-16-4 at batch 4096, then WRN-40-4 at batch 16384
    Setting(_SCALE, 4096 / 50000, 10, 875, rdp=0.988, prv=0.923),
    Setting(_SCALE, 4096 / 50000, 6, 1125, rdp=2.000, prv=1.858),
    Setting(_SCALE, 4096 / 50000, 5, 1593, rdp=2.983),
    Setting(_SCALE, 4096 / 50000, 4, 1687, rdp=3.996, prv=3.710),
    Setting(_SCALE, 4096 / 50000, 3, 1843, rdp=5.952, prv=5.530),
    Setting(_SCALE, 4096 / 50000, 3, 2468, rdp=7.05),
    Setting(_SCALE, 4096 / 50000, 3, 2500, prv=6.60),
    Setting(_SCALE, 16384 / 50000, 40, 906, rdp=0.999),
    Setting(_SCALE, 16384 / 50000, 24, 1156, rdp=1.999),
    Setting(_SCALE, 16384 / 50000, 20, 1656, rdp=2.992),
    Setting(_SCALE, 16384 / 50000, 16, 1765, rdp=3.994),
    Setting(_SCALE, 16384 / 50000, 12, 2007, rdp=5.996),
    Setting(_SCALE, 16384 / 50000, 9.4, 2000, rdp=7.990, prv=7.45),
    Setting("De et al. 2022, ImageNet", 16384 / 1271167, 2.5, 71589, delta=8e-7, rdp=8.000),
    Setting("De et al. 2022, fine-tuning", 16384 / 50000, 21.1, 250, rdp=0.998),
    Setting("Tang et al. 2023, DP-RandP", 4096 / 50000, 9.3, 875, prv=0.999),
    Setting("Tang et al. 2023, DP-RandP head", 1.0, 38, 100),
    # settings from which this project's recipes started
    Setting(_OWN, 6000 / 60000, 2.997, 400, pld=2.925),
    Setting(_OWN, 10000 / 60000, 3.814, 240, pld=2.928),
    Setting(_OWN, 2048 / 60000, 1.958, 1172, pld=2.696),
    Setting(_OWN, 8192 / 60000, 3.40, 293, pld=2.999),
    Setting(_OWN, 8192 / 60000, 8.84, 293, pld=0.999),
    Setting(_OWN, 8192 / 50000, 3.25, 183, pld=2.997),
    Setting(_OWN, 8192 / 50000, 8.41, 183, pld=0.999),
    Setting(_OWN, 4096 / 50000, 1.662, 150, pld=2.997),
    # what typical bugs cost: a run certified at 3.60, and what it truly is
    Setting("certified", 4096 / 50000, 3, 875, pld=3.60),
    Setting("true cost of noise / sqrt 2", 4096 / 50000, 3 / 2**0.5, 875, pld=5.60),
    Setting("true cost of noise / 2", 4096 / 50000, 1.5, 875, pld=9.14),
    Setting("true cost of q * 2", 8192 / 50000, 3, 875, pld=8.07),
    Setting("true cost of steps * 2", 4096 / 50000, 3, 1750, pld=5.35),
    Setting("printed with 10 % of the steps lost", 4096 / 50000, 3, 788, pld=3.39),
    Setting("printed for shuffled batches", 1 / 1000, 0.8, 1000, pld=0.30),
)
