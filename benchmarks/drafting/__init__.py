"""Do drafts draft well? Acceptance by drafter, calibration and numeric class."""
