import numpy as np

from trtdet.calibration.channel_ranges import Extremes


def test_ranges_leave_room_for_what_still_grows():
    found = Extremes()
    for high in (10.0, 20.0, 15.0, 5.0):
        found.update(np.array([[[-1.0, high]], [[-1.0, high / 2]]], np.float32))
    low, high = found.ranges()
    # 15 in one half of the images, 20 in the other: a factor of sqrt(20 / 15) for each of two doublings.
    np.testing.assert_allclose(low, [-1, -1])
    np.testing.assert_allclose(high, np.array([20, 10]) * 20 / 15)


def test_ranges_of_one_image_and_of_silence():
    found = Extremes()
    found.update(np.zeros((2, 1, 4), np.float32))
    np.testing.assert_array_equal(found.ranges(), np.zeros((2, 2)))
