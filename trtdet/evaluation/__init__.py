"""How good a detector is: COCO mAP, and the difference of two detectors with its interval."""
