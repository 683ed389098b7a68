//! The directory copier of examples/copy_tree, on real trees, compared with `cp -r`.

#[expect(dead_code, reason = "its `main`, and what only that needs")]
#[path = "../copy_tree.rs"]
mod copy_tree;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;

use copy_tree::Copy;

const NONE: [PathBuf; 0] = [];

/// Makes a tree with every kind of file that is copied.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("a/b/c")).unwrap();
    fs::create_dir(root.join("empty directory")).unwrap();
    fs::write(root.join("empty"), "").unwrap();
    for len in [1, 4095, 4096, (512 << 10) - 1, 512 << 10, (512 << 10) + 1, 700_000] {
        let bytes: Vec<u8> = (0..len).map(|at: u32| (at % 251) as u8).collect();
        fs::write(root.join("a").join(len.to_string()), bytes).unwrap();
    }
    for nr in 0..200 {
        fs::write(root.join("a/b").join(format!("é {nr}\n")), nr.to_string()).unwrap();
    }
    symlink("../a/1", root.join("a/link")).unwrap();
    symlink("/does/not/exist", root.join("dangling")).unwrap();
    symlink("b", root.join("a/link to a directory")).unwrap();
    for (name, mode) in [("run", 0o755), ("secret", 0o600), ("read only", 0o444), ("set", 0o4755)] {
        fs::write(root.join(name), name).unwrap();
        fs::set_permissions(root.join(name), Permissions::from_mode(mode)).unwrap();
    }
    fs::create_dir(root.join("closed")).unwrap();
    fs::write(root.join("closed/file"), "x").unwrap();
    fs::set_permissions(root.join("closed"), Permissions::from_mode(0o500)).unwrap();
    // A hole at the start, in the middle, at the end, and nothing but a hole.
    for (name, data, len) in [
        ("begin", &[2 << 20][..], (2 << 20) + 5),
        ("middle", &[0, 4 << 20], (4 << 20) + 5),
        ("end", &[0], 3 << 20),
        ("all", &[], 5 << 20),
    ] {
        let file = File::create(root.join(name)).unwrap();
        file.set_len(len).unwrap();
        data.iter().for_each(|&at| file.write_all_at(b"data", at).unwrap());
    }
}

/// Compares a copy with its source. Returns the paths that differ.
fn differences(from: &Path, to: &Path) -> Vec<PathBuf> {
    let (mut dirs, mut differ) = (vec![PathBuf::new()], Vec::new());
    while let Some(dir) = dirs.pop() {
        let names = |root: &Path| -> BTreeSet<OsString> {
            fs::read_dir(root.join(&dir)).unwrap().map(|entry| entry.unwrap().file_name()).collect()
        };
        let (ours, theirs) = (names(to), names(from));
        differ.extend(ours.symmetric_difference(&theirs).map(|name| dir.join(name)));
        for path in ours.intersection(&theirs).map(|name| dir.join(name)) {
            let (a, b) = (from.join(&path), to.join(&path));
            let (was, is) = (fs::symlink_metadata(&a).unwrap(), fs::symlink_metadata(&b).unwrap());
            let owner_may = |mode: u32| mode & 0o700; // the umask may take the rest
            let same = was.file_type() == is.file_type()
                && owner_may(was.mode()) == owner_may(is.mode())
                && is.mode() & 0o777 & !was.mode() == 0
                && (!was.is_file() || fs::read(&a).unwrap() == fs::read(&b).unwrap())
                && (!was.is_symlink() || fs::read_link(&a).unwrap() == fs::read_link(&b).unwrap());
            if !same {
                differ.push(path);
            } else if was.is_dir() {
                dirs.push(path);
            }
        }
    }
    differ
}

#[test]
fn a_copy_has_everything_that_cp_copies() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to, by_cp] = ["from", "to", "cp"].map(|name| folder.path().join(name));
    tree(&from);
    let totals = copy_tree::copy_tree(&from, &to).unwrap();
    assert_eq!((totals.files, totals.directories, totals.links, totals.errors), (217, 6, 3, 0));
    assert_eq!(differences(&from, &to), NONE);
    assert!(Command::new("cp").arg("-r").args([&from, &by_cp]).status().unwrap().success());
    assert_eq!(differences(&by_cp, &to), NONE);
    for name in ["run", "secret", "read only", "set", "closed", "begin", "middle", "end", "all"] {
        let (was, is) = (by_cp.join(name), to.join(name));
        let (was, is) = (fs::metadata(was).unwrap(), fs::metadata(is).unwrap());
        assert_eq!(was.mode() & 0o7777, is.mode() & 0o7777, "{name}");
        assert!(is.blocks() <= was.blocks() + 64, "{name}: {} blocks", is.blocks());
    }
    // The comparison sees what differs.
    fs::write(to.join("a/4096"), vec![0; 4096]).unwrap();
    fs::set_permissions(to.join("run"), Permissions::from_mode(0o644)).unwrap();
    fs::remove_file(to.join("a/link")).unwrap();
    fs::write(to.join("more"), "").unwrap();
    let mut differ = differences(&from, &to);
    differ.sort();
    assert_eq!(differ, ["a/4096", "a/link", "more", "run"].map(PathBuf::from));
    // The target must not exist.
    assert!(copy_tree::copy_tree(&from, &to).is_err());
}

#[test]
fn a_directory_that_is_gone_at_the_end_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::create_dir(&from).unwrap();
    fs::set_permissions(&from, Permissions::from_mode(0o500)).unwrap();
    let copy = Rc::new(Copy::begin(&from, &to).unwrap());
    fs::remove_dir(&to).unwrap();
    let totals = copy.run().unwrap();
    assert_eq!((totals.directories, totals.errors), (1, 1));
}

#[test]
fn a_copy_into_its_own_source_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("from");
    fs::create_dir(&from).unwrap();
    symlink(&from, folder.path().join("link")).unwrap();
    for to in ["from/to", "link/to", "from/../link/to"] {
        let error = copy_tree::copy_tree(&from, &folder.path().join(to)).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput, "{to}");
    }
    assert_eq!(fs::read_dir(&from).unwrap().count(), 0);
    copy_tree::copy_tree(&from, &folder.path().join("from 2")).unwrap(); // only the name begins so
}

#[test]
fn a_file_that_cannot_be_copied_is_reported_and_the_rest_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::create_dir(&from).unwrap();
    (0..100).for_each(|nr| fs::write(from.join(nr.to_string()), "text").unwrap());
    let _socket = UnixListener::bind(from.join("socket")).unwrap();
    symlink("nowhere", from.join("link")).unwrap();
    let copy = Rc::new(Copy::begin(&from, &to).unwrap());
    fs::write(to.join("link"), "older").unwrap();
    // The names of the directory are read with the first one. Some of the files vanish then, one is
    // replaced by a link, and one has a copy already.
    let (first, _) = copy.next_file().unwrap();
    let others: Vec<_> =
        (0..100).map(|nr| nr.to_string()).filter(|nr| !first.ends_with(nr)).collect();
    (0..10).for_each(|nr| fs::remove_file(from.join(&others[nr])).unwrap());
    fs::remove_file(from.join(&others[10])).unwrap();
    symlink("/etc/passwd", from.join(&others[10])).unwrap();
    fs::write(to.join(&others[11]), "older").unwrap();
    let totals = copy.run().unwrap();
    assert_eq!((totals.files, totals.links, totals.errors), (99 - 12, 0, 14));
    assert_eq!(fs::read_to_string(to.join(&others[11])).unwrap(), "older");
    assert!(!to.join(&others[10]).exists() && !to.join(&others[0]).exists());
    assert_eq!(fs::read_to_string(to.join(&others[50])).unwrap(), "text");
}

/// A file that becomes shorter or grows while it is copied is copied as far as it is there.
#[test]
fn files_that_change_meanwhile_do_not_stop_a_copy() {
    let folder = tempfile::tempdir().unwrap();
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::create_dir(&from).unwrap();
    let file = File::create(from.join("file")).unwrap();
    file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
    let changes = std::thread::spawn(move || {
        for round in 0..2000 {
            file.set_len(if round % 2 == 0 { 1000 } else { 1 << 20 }).unwrap();
        }
    });
    for round in 0..20 {
        let totals = copy_tree::copy_tree(&from, &to.with_extension(round.to_string())).unwrap();
        assert_eq!((totals.files, totals.errors), (1, 0));
    }
    changes.join().unwrap();
}
