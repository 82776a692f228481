"""The transforms of torchvision and MONAI that a recipe may name, and the options that each may have.

A recipe comes from a server, and what it names runs at every site. So these tables are complete. Their classes read and
write no file, and take no code, path or callable; and of their options only those are listed that are plain values.

What a name without a slash stands for is a plug-in of the site's own: only a site's policy can allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from protofed.common.errors import ConfigError, short, unknown

MAX_TRANSFORMS = 16  # of one recipe's preparation, or of its augmentation
# No number among the options is larger. A square image of this side has `MAX_IMAGE_VALUES` pixels.
MAX_OPTION = 4096
FAMILIES = ("torchvision/*", "monai/*")  # what a policy may name in place of all transforms of one library

# Equal images give equal results: these prepare images, and may stand among the random ones.
_DETERMINISTIC: Mapping[str, str] = {
    "torchvision/CenterCrop": "size",
    "torchvision/Grayscale": "num_output_channels",
    "torchvision/Pad": "padding fill padding_mode",
    "torchvision/Resize": "size interpolation max_size antialias",
    "monai/AdjustContrast": "gamma invert_image retain_stats",
    "monai/BorderPad": "spatial_border mode",
    "monai/CenterScaleCrop": "roi_scale",
    "monai/CenterSpatialCrop": "roi_size",
    "monai/ClipIntensityPercentiles": "lower upper sharpness_factor channel_wise",
    "monai/CropForeground": "margin allow_smaller",
    "monai/GaussianSharpen": "sigma1 sigma2 alpha approx",
    "monai/GaussianSmooth": "sigma approx",
    "monai/HistogramNormalize": "num_bins min max",
    "monai/MedianSmooth": "radius",
    "monai/Resize": "spatial_size size_mode mode align_corners anti_aliasing",
    "monai/ResizeWithPadOrCrop": "spatial_size method mode",
    "monai/ScaleIntensity": "minv maxv factor channel_wise",
    "monai/ScaleIntensityRange": "a_min a_max b_min b_max clip",
    "monai/ScaleIntensityRangePercentiles": "lower upper b_min b_max clip relative channel_wise",
    "monai/SpatialPad": "spatial_size method mode",
}
# These draw random numbers: of torchvision from PyTorch's generators, of MONAI from the state that they are given.
_RANDOM: Mapping[str, str] = {
    "torchvision/AugMix": "severity mixture_width chain_depth alpha all_ops interpolation fill",
    "torchvision/ColorJitter": "brightness contrast saturation hue",
    "torchvision/ElasticTransform": "alpha sigma interpolation fill",
    "torchvision/GaussianBlur": "kernel_size sigma",
    "torchvision/GaussianNoise": "mean sigma clip",
    "torchvision/RandAugment": "num_ops magnitude num_magnitude_bins interpolation fill",
    "torchvision/RandomAdjustSharpness": "sharpness_factor p",
    "torchvision/RandomAffine": "degrees translate scale shear interpolation fill center",
    "torchvision/RandomAutocontrast": "p",
    "torchvision/RandomCrop": "size padding pad_if_needed fill padding_mode",
    "torchvision/RandomEqualize": "p",
    "torchvision/RandomErasing": "p scale ratio value",
    "torchvision/RandomGrayscale": "p",
    "torchvision/RandomHorizontalFlip": "p",
    "torchvision/RandomPerspective": "distortion_scale p interpolation fill",
    "torchvision/RandomPosterize": "bits p",
    "torchvision/RandomResizedCrop": "size scale ratio interpolation antialias",
    "torchvision/RandomRotation": "degrees interpolation center fill",
    "torchvision/RandomVerticalFlip": "p",
    "torchvision/TrivialAugmentWide": "num_magnitude_bins interpolation fill",
    "monai/Rand2DElastic": "spacing magnitude_range prob rotate_range shear_range translate_range scale_range "
    "mode padding_mode",
    "monai/RandAdjustContrast": "prob gamma invert_image retain_stats",
    "monai/RandAffine": "prob rotate_range shear_range translate_range scale_range mode padding_mode",
    "monai/RandAxisFlip": "prob",
    "monai/RandBiasField": "degree coeff_range prob",
    "monai/RandCoarseDropout": "holes spatial_size dropout_holes fill_value max_holes max_spatial_size prob",
    "monai/RandCoarseShuffle": "holes spatial_size max_holes max_spatial_size prob",
    "monai/RandFlip": "prob spatial_axis",
    "monai/RandGaussianNoise": "prob mean std sample_std",
    "monai/RandGaussianSharpen": "sigma1_x sigma1_y sigma2_x sigma2_y alpha approx prob",
    "monai/RandGaussianSmooth": "sigma_x sigma_y prob approx",
    "monai/RandGibbsNoise": "prob alpha",
    "monai/RandGridDistortion": "num_cells prob distort_limit mode padding_mode",
    "monai/RandHistogramShift": "num_control_points prob",
    "monai/RandRicianNoise": "prob mean std channel_wise relative sample_std",
    "monai/RandRotate": "range_x prob mode padding_mode align_corners",
    "monai/RandRotate90": "prob max_k",
    "monai/RandScaleIntensity": "factors prob channel_wise",
    "monai/RandShiftIntensity": "offsets safe prob channel_wise",
    "monai/RandSpatialCrop": "roi_size max_roi_size random_center random_size",
    "monai/RandZoom": "prob min_zoom max_zoom mode padding_mode align_corners",
}
OPTIONS: Mapping[str, frozenset[str]] = {
    name: frozenset(options.split()) for name, options in {**_DETERMINISTIC, **_RANDOM}.items()
}


def is_random(name: str) -> bool:
    """Whether a transform of the tables draws random numbers; of a plug-in nobody knows before it has run."""
    return name in _RANDOM


def is_shipped(name: str) -> bool:
    """Whether a name is one of a library's; any other is a plug-in's."""
    return "/" in name


def check_transform(name: str, options: Mapping[str, object]) -> None:
    """Check that a recipe may name this transform with these options.

    Raises:
        ConfigError: a library's name, or an option of it, is not in the tables (with the nearest one that is); or an
            option is no plain value, or a number above `MAX_OPTION`.
    """
    if is_shipped(name) and name not in OPTIONS:
        library = name.partition("/")[0]
        raise unknown("transform", name, [one for one in OPTIONS if one.startswith(f"{library}/")] or OPTIONS)
    for option, value in options.items():
        if name in OPTIONS and option not in OPTIONS[name]:
            raise unknown(f"option of {name}", option, OPTIONS[name])
        for number in _plain_values(option, value):
            if abs(number) > MAX_OPTION:
                raise ConfigError(f"{short(name)}: {short(option)} = {number:g}; expected at most {MAX_OPTION}")


def check_allowed_names(names: frozenset[str]) -> frozenset[str]:
    """Check that each name in a policy is a transform of the tables, or one of `FAMILIES`.

    Raises:
        ValueError: one is not; the text has the nearest that is.
    """
    known = {*OPTIONS, *FAMILIES}
    for name in sorted(names - known):
        hint = "" if is_shipped(name) else ". A plug-in belongs into `plugins`"
        raise ValueError(f"{unknown('transform', name, known)}{hint}")
    return names


def is_allowed(name: str, allowed: frozenset[str]) -> bool:
    """Whether a policy that names these transforms and families allows a library's transform."""
    return name in allowed or (name in OPTIONS and f"{name.partition('/')[0]}/*" in allowed)


def _plain_values(option: str, value: object) -> Iterator[float]:
    """The numbers of an option, those of its lists included."""
    match value:
        case bool() | str():
            return
        case int() | float():
            yield value
        case list() | tuple():
            for item in value:
                yield from _plain_values(option, item)
        case _:
            raise ConfigError(f"{short(option)}: expected a number, a text, true or false, or a list of them")
