"""Numbers as a reader sees them."""

MEASURES = {"loss": "loss", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}


def number(value: float | None, digits: int = 3) -> str:
    """A number with `digits` digits after the point; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}"


def duration(seconds: float) -> str:
    """Minutes and seconds, or hours, minutes and seconds."""
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"
