import json

from PIL import Image

from trtdet.cli import main
from trtdet.exporter import SHAPES_MODEL


def test_infer_takes_files_folders_and_lists(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "notes.md").write_text("no image")
    for path in (tmp_path / "c.png", folder / "b.png", folder / "a.png", tmp_path / "d.png"):
        Image.new("RGB", (64, 48), (10, 200, 30)).save(path)
    (tmp_path / "list.txt").write_text("d.png\n")
    sources = [str(tmp_path / "c.png"), str(folder), str(tmp_path / "list.txt")]
    out = tmp_path / "out"
    assert main(["infer", str(SHAPES_MODEL), *sources, "--config", "shapes", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["image"] for row in found["images"]] == ["c.png", "a.png", "b.png", "d.png"]
    assert sorted(path.name for path in out.iterdir()) == ["a.jpg", "b.jpg", "c.jpg", "d.jpg", "detections.json"]
    (tmp_path / "empty").mkdir()
    command = ["infer", str(SHAPES_MODEL), str(tmp_path / "empty"), "--config", "shapes", "-o", str(tmp_path / "none")]
    assert main(command) == 1
    assert "has no images" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
