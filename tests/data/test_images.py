import cv2
import numpy as np
import pytest
from PIL import Image

from trtdet.config import InputConfig
from trtdet.data.images import ImageTransform, decode_image, draw, preprocess, read_image
from trtdet.errors import DataError


def picture(height: int = 24, width: int = 40) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) % 256], axis=-1).astype(np.uint8)


# Decoding


def test_rgb_png_is_read_as_stored(tmp_path):
    Image.fromarray(picture()).save(tmp_path / "a.png")
    pixels = read_image(tmp_path / "a.png")
    assert pixels.dtype == np.uint8 and pixels.flags["C_CONTIGUOUS"] and pixels.flags["WRITEABLE"]
    np.testing.assert_array_equal(pixels, picture())


@pytest.mark.parametrize("alpha", [0, 128])
def test_alpha_is_dropped_not_blended(tmp_path, alpha):
    rgba = np.dstack([picture(), np.full((24, 40), alpha, np.uint8)])
    Image.fromarray(rgba).save(tmp_path / "a.png")
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), picture())


@pytest.mark.parametrize("mode", ["L", "LA", "1"])
def test_grey_becomes_three_equal_channels(tmp_path, mode):
    image = Image.fromarray(picture()).convert("L").convert(mode)
    image.save(tmp_path / "a.png")
    expected = np.asarray(image.convert("L"))
    pixels = read_image(tmp_path / "a.png")
    for channel in range(3):
        np.testing.assert_array_equal(pixels[..., channel], expected)


@pytest.mark.parametrize("transparent", [False, True])
def test_palette(tmp_path, transparent):
    image = Image.fromarray(picture()).quantize(16)
    options = {"transparency": bytes([0] * 16)} if transparent else {}
    image.save(tmp_path / "a.png", **options)
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), np.asarray(image.convert("RGB")))


def test_cmyk_jpeg(tmp_path):
    flat = np.broadcast_to(np.array([200, 60, 20], np.uint8), (32, 32, 3))
    Image.fromarray(np.ascontiguousarray(flat)).convert("CMYK").save(tmp_path / "a.jpg", quality=95)
    assert np.abs(read_image(tmp_path / "a.jpg").astype(int) - [200, 60, 20]).max() <= 4


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bit_grey_is_divided_by_257(tmp_path, suffix):
    grey = np.array([[0, 257, 32896, 65535], [128, 129, 65278, 65407]], np.uint16)
    path = tmp_path / f"a.{suffix}"
    assert cv2.imwrite(str(path), grey)
    np.testing.assert_array_equal(read_image(path)[..., 0], [[0, 1, 128, 255], [0, 1, 254, 255]])


def test_32_bit_grey_within_16_bits_is_read_and_above_is_refused(tmp_path):
    path = tmp_path / "a.tif"
    Image.fromarray(np.array([[0, 65535]], np.int32)).save(path)
    np.testing.assert_array_equal(read_image(path)[0, :, 0], [0, 255])
    Image.fromarray(np.array([[0, 65536]], np.int32)).save(path)
    with pytest.raises(DataError, match=r"a\.tif' has grey levels 0\.\.65536, allowed are 0\.\.65535"):
        read_image(path)


def test_float_pixels_are_refused(tmp_path):
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif' has floating-point pixels"):
        read_image(tmp_path / "a.tif")


def test_exif_orientation_is_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    Image.fromarray(picture(24, 40)).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (24, 40, 3)


def test_truncated_jpeg(tmp_path):
    path = tmp_path / "cut.jpg"
    Image.fromarray(picture(200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(DataError, match=r"cut\.jpg' cannot be decoded: .*truncated.*; replace the file") as caught:
        read_image(path)
    assert "\n" not in str(caught.value)


def test_an_image_at_hand_is_decoded_as_one_in_a_file(tmp_path):
    path = tmp_path / "a.jpg"
    Image.fromarray(picture(200, 200)).save(path)
    data = path.read_bytes()
    np.testing.assert_array_equal(decode_image(data), read_image(path))
    with pytest.raises(DataError, match=r"^the image cannot be decoded: .*truncated.*; send a whole image file$"):
        decode_image(data[:-600])
    with pytest.raises(
        DataError, match="^the image cannot be decoded: cannot identify image; send a whole image file$"
    ):
        decode_image(b"not an image")
    Image.fromarray(np.zeros((2, 2), np.float32)).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match="^the image has floating-point pixels"):
        decode_image((tmp_path / "a.tiff").read_bytes())


@pytest.mark.parametrize("content", [b"", b"not an image", b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"])
def test_not_an_image(tmp_path, content):
    path = tmp_path / "bad.png"
    with pytest.raises(DataError, match=r"bad\.png' does not exist"):
        read_image(path)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.png' cannot be decoded"):
        read_image(path)
    with pytest.raises(DataError, match="cannot be decoded"):
        read_image(tmp_path)


@pytest.mark.parametrize("limit", [100, 900])  # Pillow's error is at twice the limit, its warning at the limit
@pytest.mark.filterwarnings("error")
def test_decompression_bomb(tmp_path, monkeypatch, limit):
    Image.fromarray(picture()).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=r"bomb\.png' cannot be decoded: .*bomb"):
        read_image(tmp_path / "bomb.png")


def test_equals_opencv_on_coco(shared_data):
    for path in sorted((shared_data / "coco" / "val2017").iterdir())[:24]:
        expected = cv2.imread(str(path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        np.testing.assert_array_equal(read_image(path)[..., ::-1], expected)


# Into the network


def test_topleft_letterbox_against_opencv():
    image = picture(427, 640)
    tensor, placement = preprocess(image, InputConfig(size=(416, 416), resize="letterbox-topleft", color="bgr"))
    expected = np.full((416, 416, 3), 114, np.uint8)
    expected[:278] = cv2.resize(image, (416, 278), interpolation=cv2.INTER_LINEAR)
    np.testing.assert_array_equal(tensor, expected[..., ::-1].transpose(2, 0, 1).astype(np.float32))
    assert tensor.dtype == np.float32 and tensor.flags["C_CONTIGUOUS"]
    assert placement == ImageTransform(416 / 640, 278 / 427, 0, 0, 640, 427)


def test_centre_letterbox_puts_the_odd_pixel_last():
    image = np.full((427, 640, 3), 200, np.uint8)
    tensor, placement = preprocess(image, InputConfig(size=(640, 640), resize="letterbox-centre", pad_value=7))
    rows = tensor[0, :, 0]
    assert (placement.pad_x, placement.pad_y) == (0, 106)
    assert (rows[:106] == 7).all() and (rows[106:533] == 200).all() and (rows[533:] == 7).all()
    assert 640 - 533 == 107


@pytest.mark.parametrize("border", range(12))
def test_centre_letterbox_is_yolov5s_rounding(border):
    _, placement = preprocess(np.zeros((64 - border, 64, 3), np.uint8), InputConfig(size=(64, 64)))
    assert placement.pad_y == round(border / 2 - 0.1)


@pytest.mark.parametrize("name", ["nearest", "linear", "cubic", "area"])
def test_stretch_uses_the_interpolation(name):
    image = np.random.default_rng(0).integers(0, 256, (50, 30, 3), dtype=np.uint8)
    tensor, placement = preprocess(image, InputConfig(size=(20, 40), resize="stretch", interpolation=name))
    before = cv2.ipp.useIPP()
    cv2.ipp.setUseIPP(False)
    expected = cv2.resize(image, (40, 20), interpolation=getattr(cv2, f"INTER_{name.upper()}"))
    cv2.ipp.setUseIPP(before)
    np.testing.assert_array_equal(tensor, expected.transpose(2, 0, 1))
    assert (placement.scale_x, placement.scale_y) == (40 / 30, 20 / 50)


def test_cubic_interpolation_is_that_of_every_machine():
    """With Intel's IPP, where OpenCV has it, other grey levels would come out than elsewhere and in C++."""
    image = np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8)
    setting = cv2.ipp.useIPP()
    tensor, _ = preprocess(image, InputConfig(size=(5, 7), resize="stretch", interpolation="cubic"))
    assert tensor[0, 3].tolist() == [159, 81, 144, 101, 227, 214, 76]  # IPP's last is 75
    assert cv2.ipp.useIPP() == setting


@pytest.mark.parametrize("color", ["rgb", "bgr"])
def test_normalisation_is_in_the_order_of_color_and_covers_the_border(color):
    image = picture(10, 20)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 0.125)
    pixels = {"color": color, "scale": 1 / 255, "mean": mean, "std": std, "pad_value": 50}
    tensor, _ = preprocess(image, InputConfig(size=(20, 20), resize="letterbox-topleft", **pixels))
    canvas = np.full((20, 20, 3), 50, np.uint8)
    canvas[:10] = image
    ordered = canvas if color == "rgb" else canvas[..., ::-1]
    expected = (ordered / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(tensor, expected.transpose(2, 0, 1), rtol=1e-6, atol=1e-6)


def test_an_image_of_one_pixel_row_still_fits():
    tensor, placement = preprocess(np.zeros((1, 1000, 3), np.uint8), InputConfig(size=(64, 64)))
    assert tensor.shape == (3, 64, 64) and np.isfinite(placement.to_image([[0, 0, 64, 64]])).all()


@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 4), "uint8"), ((4, 4, 4), "uint8"), ((4, 4, 3), "float32"), ((0, 4, 3), "uint8")]
)
def test_preprocess_refuses_other_arrays(shape, dtype):
    with pytest.raises(DataError, match=r"expected uint8 \(H, W, 3\)"):
        preprocess(np.zeros(shape, dtype), InputConfig(size=(64, 64)))


# And back


@pytest.mark.parametrize("resize", ["letterbox-topleft", "letterbox-centre", "stretch"])
def test_placement_maps_a_drawn_box_to_where_it_lies(resize):
    image = np.zeros((300, 500, 3), np.uint8)
    image[60:180, 100:350] = 255
    tensor, placement = preprocess(image, InputConfig(size=(256, 320), resize=resize, pad_value=0))
    rows, columns = np.flatnonzero(tensor[0].max(axis=1) > 127), np.flatnonzero(tensor[0].max(axis=0) > 127)
    seen = [[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]]
    np.testing.assert_allclose(placement.to_network([[100, 60, 350, 180]]), seen, atol=0.75)
    np.testing.assert_allclose(placement.to_image(seen), [[100, 60, 350, 180]], atol=1.5)


def test_placement_is_its_own_inverse_and_clips():
    placement = ImageTransform(0.5, 0.4, 10, 20, 200, 100)
    boxes = np.array([[0, 0, 200, 100], [3.5, 4.25, 60, 70]], np.float32)
    back = placement.to_image(placement.to_network(boxes))
    np.testing.assert_allclose(back, boxes, atol=1e-4)
    assert back.dtype == np.float32
    np.testing.assert_array_equal(placement.to_image([[-1e9, -np.inf, np.inf, 1e9]]), [[0, 0, 200, 100]])
    assert placement.to_image(np.zeros((0, 4))).shape == (0, 4)


# Pictures for people


def test_draw_leaves_the_image_alone_and_colours_by_class():
    image, boxes = np.zeros((120, 160, 3), np.uint8), [[20, 40, 70, 100], [90, 40, 150, 100]]
    out = draw(image, boxes, [0.9, 0.5], [0, 1], ["cat", "dog"])
    assert out.shape == image.shape and out.dtype == np.uint8 and not image.any()
    assert out[80, 20].any() and out[80, 90].any()
    assert not (out[80, 20] == out[80, 90]).all()
    assert not out[70, 45].any()  # the inside stays
    np.testing.assert_array_equal(out, draw(image, boxes, [0.9, 0.5], [0, 1], ["cat", "dog"]))


def test_a_label_lies_within_its_ground_and_the_ground_on_the_box():
    # Descenders and capitals: the text takes the whole height that the font has.
    image = np.full((400, 400, 3), 90, np.uint8)
    out = draw(image, [[100, 200, 300, 380]], [0.88], [0], ["Jgpq"])
    changed = (out != image).any(axis=2)
    rows = np.flatnonzero(changed.any(axis=1))
    label = out[rows[0] : 200]
    columns = np.flatnonzero(changed[rows[0]])
    ground = label[0, columns[0]]
    assert (label[0, columns] == ground).all(), "the text touches the upper edge of its ground"
    inside = label[:, columns[0] : columns[-1] + 1]
    assert (inside != ground).any(), "there is no text"
    assert not changed[rows[0] : 198, columns[-1] + 1 :].any() and not changed[: rows[0]].any()
    # Under the label there is the box's edge and then the image again, and no ink.
    assert not changed[202:370, 110:290].any()


@pytest.mark.parametrize(
    ("left", "top"), [(100, 200), (370, 200), (100, 0)], ids=["above", "at the right", "at the top"]
)
def test_a_label_begins_where_its_box_does_unless_it_would_leave_the_image(left, top):
    image = np.full((400, 400, 3), 90, np.uint8)
    changed = (draw(image, [[left, top, left + 20, 380]], [0.88], [0], ["classes"]) != image).any(axis=2)
    rows = changed[top + 4 : top + 8] if top == 0 else changed[top - 8 : top - 4]
    (columns,) = np.nonzero(rows.all(axis=0))
    assert len(columns) > 30, "the ground of the label"
    if left == 100:
        assert abs(columns[0] - left) <= 2
    else:
        assert columns[-1] == 399 and columns[0] < left


def test_an_outline_reaches_the_last_row_and_column_and_no_further():
    out = draw(np.zeros((60, 80, 3), np.uint8), [[40, 30, 900, 900]], [0.9], [0], ["cat"])
    assert (out[36:56, 79] > 2 * out[36:56, 78]).all() and (out[59, 44:76] > 2 * out[58, 44:76]).all()
    assert not out[36:56, 44:76].any() and not out[:, :36].any()


def test_draw_survives_boxes_outside_and_unknown_classes():
    out = draw(np.zeros((30, 30, 3), np.uint8), [[-50, -50, 900, np.nan], [0, 0, 1, 1]], [1.0, 0.2], [7, -1], ["cat"])
    assert out.any()
    assert not draw(np.zeros((30, 30, 3), np.uint8), np.zeros((0, 4)), [], [], []).any()


def test_draw_gives_each_coco_class_its_own_colour():
    colours = set()
    for index in range(80):
        out = draw(np.zeros((60, 60, 3), np.uint8), [[10, 30, 50, 55]], [1.0], [index], [])
        colours.add(tuple(out[45, 10].tolist()))
    assert len(colours) == 80
