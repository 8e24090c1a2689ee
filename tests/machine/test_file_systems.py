"""Which file system a folder is on, by made-up mount points."""

import pytest

from hpcdl.machine.file_systems import file_system

MOUNTS = """/dev/sda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
tmpfs /home/ann/with\\040späce tmpfs rw 0 0
old /scratch ext4 rw 0 0
mds@tcp:/scratch /scratch lustre rw 0 0
"""


@pytest.mark.parametrize(
    "folder, kind",
    [
        ("/usr/lib", "ext4"),
        ("/home/ann/cache", "nfs4"),
        ("/homes", "ext4"),
        ("/home/ann/with späce/cache", "tmpfs"),
        ("/scratch/ann", "lustre"),  # mounted over another one
        ("/", "ext4"),
    ],
)
def test_the_file_system_of_a_folder(tmp_path, folder, kind):
    (tmp_path / "mounts").write_text(MOUNTS)
    assert file_system(folder, tmp_path / "mounts") == kind
    assert file_system(folder, tmp_path / "nowhere") == ""


def test_a_link_is_followed(tmp_path):
    (tmp_path / "mounts").write_text(f"/dev/sda / ext4 rw 0 0\nserver:/ {tmp_path.resolve()}/far nfs rw 0 0\n")
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    assert file_system(str(tmp_path / "near"), tmp_path / "mounts") == "nfs"
