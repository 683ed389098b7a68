//! Folders, the names of exports, and images that were renamed or replaced.

use std::fs::{File, OpenOptions};
use std::time::Instant;

use clap::Parser;
use testkit::wait_until;

use super::*;

/// Makes a folder with images, and its exports.
fn folder(images: &[(&str, u64)], more: &[&str]) -> (tempfile::TempDir, ExportTable) {
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in images {
        File::create(dir.path().join(name)).unwrap().set_len(*size).unwrap();
    }
    let path = dir.path().to_str().unwrap();
    let args = [&["offlock-nbd", "--export-dir", path], more].concat();
    let table = ExportTable::open(&Args::parse_from(args)).unwrap();
    (dir, table)
}

impl ExportTable {
    fn size_of(&self, name: &str) -> Option<u64> {
        self.find_export(name).ok().flatten().map(|info| info.size)
    }

    fn opened_size(&self, name: &str) -> Option<u64> {
        self.open_export(name).ok().flatten().map(|export| export.info.size)
    }

    fn list(&self) -> Vec<String> {
        Opening::new(self).list().into_iter().map(|listed| listed.name).collect()
    }
}

#[test]
fn a_folder_is_opened_image_by_image_and_only_so_many_at_a_time() {
    let all = [("a", 4096), ("b", 8192), ("c", 1), ("d", 2)];
    for cache in ["0", "1M"] {
        let (_dir, table) = folder(&all, &["--cache", cache]);
        assert_eq!(table.list(), ["a", "b", "c", "d"]);
        assert_eq!((table.size_of(""), table.opened_size("")), (None, None), "there is no default");
        for (name, bytes) in all {
            assert_eq!(table.size_of(name), Some(bytes), "to look opens nothing");
        }
        assert_eq!(table.images().len(), 0);
        for (name, bytes) in &all[..3] {
            assert_eq!(table.opened_size(name), Some(*bytes));
            assert_eq!(table.opened_size(name), Some(*bytes), "once");
        }
        assert_eq!(table.images().len(), 3);
        assert!(table.open_export("d").ok().flatten().is_none(), "one too many");
        assert_eq!(table.size_of("d"), Some(2), "and yet it is there");
        assert_eq!(table.open_export("b").ok().flatten().unwrap().image.len(), 8192);
        table.sync().unwrap();
        table.images.release_idle(Instant::now(), waits::IDLE);
        table.images.release_idle(Instant::now() + Duration::from_secs(60), waits::IDLE);
        wait_until(|| table.opened_size("d").is_some()); // once another image is released
    }
}

#[test]
fn exports_of_the_command_line_neither_take_nor_leave_places_of_the_folder() {
    let outside = tempfile::tempdir().unwrap();
    let path = outside.path().join("x");
    File::create(&path).unwrap().set_len(4096).unwrap();
    let [x, y] = ["x", "y"].map(|name| format!("{name}={}", path.display()));
    let all = ["a", "b", "c", "d"];
    let (_dir, table) = folder(&all.map(|name| (name, 4096)), &["--image", &x, "--image", &y]);
    let opened = all.map(|name| table.open_export(name).ok().flatten());
    assert_eq!(opened.each_ref().map(Option::is_some), [true, true, true, false]);
}

/// A WRITE after the image's end as it was opened would be answered and then be lost.
#[test]
fn a_later_name_of_an_image_that_grew_is_as_long_as_the_first() {
    for cache in ["0", "1M"] {
        let bytes = 5000;
        let (dir, table) = folder(&[("a", 5000)], &["--cache", cache]);
        assert_eq!(table.opened_size("a"), Some(5000));
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        OpenOptions::new().write(true).open(&a).unwrap().set_len(8192).unwrap();
        std::fs::hard_link(a, b).unwrap();
        assert_eq!(table.size_of("b"), Some(bytes));
        assert_eq!(table.opened_size("b"), Some(bytes));
        assert_eq!(table.opened_size("a"), Some(5000));
    }
}

#[test]
fn a_client_gets_the_export_that_it_was_told_of() {
    let (dir, table) = folder(&[("a", 4096), ("other", 8192)], &[]);
    let opening = Opening::new(&table);
    assert_eq!(opening.open("a").unwrap().size, 4096);
    std::fs::rename(dir.path().join("other"), dir.path().join("a")).unwrap();
    assert_eq!(opening.find("a").unwrap().size, 8192, "another file has the name now");
    let opened = opening.opened.into_inner().unwrap();
    assert_eq!((opened.info.size, opened.image.len()), (4096, 4096));
    assert_eq!(table.opened_size("a"), Some(8192));
}

/// Images of the command line come first. One that is open for reading only is so by its name in the folder, too, which
/// must not announce writes.
#[test]
fn images_of_the_command_line_come_before_the_folder() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (dir, name, size) in [(&dir, "a", 1), (&dir, "b", 2), (&dir, "c", 4), (&outside, "x", 3)] {
        File::create(dir.path().join(name)).unwrap().set_len(size).unwrap();
    }
    let (path, outside) = (dir.path().to_str().unwrap(), outside.path().join("x"));
    let (image, reads) = (format!("a={}", outside.display()), format!("x={path}/b,readonly"));
    let args = ["offlock-nbd", "--image", &image, "--image", &reads, "--export-dir", path];
    let table = ExportTable::open(&Args::parse_from(args)).unwrap();
    assert_eq!(table.list(), ["a", "x", "b", "c"]);
    for (name, size, read_only) in
        [("", 3, false), ("a", 3, false), ("x", 2, true), ("b", 2, true), ("c", 4, false)]
    {
        let found = table.find_export(name).ok().flatten().unwrap();
        let opened = table.open_export(name).ok().flatten().unwrap().info;
        for info in [found, opened] {
            let is_read_only = info.flags.contains(Flags::READ_ONLY);
            assert_eq!((info.size, is_read_only), (size, read_only), "{name}");
        }
    }
}
