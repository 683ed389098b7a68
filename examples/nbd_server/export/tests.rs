//! Folders, names, and what has an export's name now.

use clap::Parser;
use nbd_protocol::HeaderStyle;

use super::*;

/// A folder with images of so many bytes, and the exports of it.
fn folder(images: &[(&str, u64)], more: &[&str]) -> (tempfile::TempDir, ExportTable) {
    let dir = tempfile::tempdir().unwrap();
    for (name, size) in images {
        File::create(dir.path().join(name)).unwrap().set_len(*size).unwrap();
    }
    let path = dir.path().to_str().unwrap();
    let args = [&["nbd_server", "--export-dir", path], more].concat();
    let table = ExportTable::open(&Args::parse_from(args)).unwrap();
    (dir, table)
}

fn size(found: Option<Cow<'_, ExportInfo>>) -> Option<u64> {
    found.map(|info| info.size)
}

#[test]
fn a_folder_is_opened_image_by_image_and_only_so_many() {
    let all = [("a", 4096), ("b", 8192), ("c", 1), ("d", 2)];
    for cache in ["0", "1M"] {
        let (_dir, table) = folder(&all, &["--cache", cache]);
        assert_eq!(table.list().len(), 4);
        assert!(table.find("").is_none() && table.open("").is_none(), "there is no default");
        for (name, bytes) in all {
            assert_eq!(size(table.find(name)), Some(bytes), "to look opens nothing");
        }
        assert_eq!(table.len(), 0);
        for (name, bytes) in &all[..3] {
            assert_eq!(size(table.open(name)), Some(*bytes));
            assert_eq!(size(table.open(name)), Some(*bytes), "once");
        }
        assert_eq!((table.len(), table.blocks.count()), (3, 3));
        assert!(table.open("d").is_none(), "one too many");
        assert_eq!(size(table.find("d")), Some(2), "and yet it is there");
        assert_eq!(table.names().collect::<Vec<_>>(), ["a", "b", "c"]);
        assert_eq!(table.image(1).len(), 8192);
        table.sync().unwrap();
    }
}

#[test]
fn another_name_of_an_open_image_is_the_same_file() {
    let (dir, table) = folder(&[("a", 4096)], &[]);
    std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    assert!(table.open("a").is_some() && table.open("b").is_some());
    assert_eq!((table.len(), table.blocks.count()), (2, 1));
    assert_eq!((table.get(0).file, table.get(1).file), (0, 0));
}

/// A WRITE behind what is kept would be answered, and be nowhere.
#[test]
fn a_later_name_of_an_image_that_grew_is_as_long_as_the_first() {
    for cache in ["0", "1M"] {
        let bytes = 5000;
        let (dir, table) = folder(&[("a", 5000)], &["--cache", cache]);
        assert_eq!(size(table.open("a")), Some(5000));
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        OpenOptions::new().write(true).open(&a).unwrap().set_len(8192).unwrap();
        std::fs::hard_link(a, b).unwrap();
        assert_eq!(size(table.find("b")), Some(bytes));
        assert_eq!(size(table.open("b")), Some(bytes));
        assert_eq!(size(table.open("a")), Some(5000));
    }
}

#[test]
fn a_client_gets_what_it_was_told_of_or_nothing() {
    let (dir, table) = folder(&[("a", 4096)], &[]);
    let info = table.open("a").unwrap().into_owned();
    let told = |size, style| Negotiated {
        export: "a".into(),
        style,
        allocation: false,
        block_sizes: false,
        size,
        flags: info.advertised(style),
        tls: false,
    };
    let index = |told| table.begin(&told).map(|(index, _)| index);
    assert_eq!(index(told(4096, HeaderStyle::Simple)), Some(0));
    assert_eq!(index(told(4096, HeaderStyle::Structured)), Some(0));
    // Another file takes the name, and another client comes first.
    let other = dir.path().join("other");
    File::create(&other).unwrap().set_len(8192).unwrap();
    std::fs::rename(other, dir.path().join("a")).unwrap();
    assert_eq!(size(table.find("a")), Some(8192));
    assert_eq!(size(table.open("a")), Some(8192));
    assert_eq!(index(told(4096, HeaderStyle::Simple)), None);
    assert_eq!(index(told(8192, HeaderStyle::Simple)), Some(1));
}

#[test]
fn a_name_is_that_of_the_file_which_has_it_now() {
    for cache in ["0", "1M"] {
        let (dir, table) = folder(&[("a", 4096), ("b", 4096)], &["--cache", cache]);
        let rename = |from, to| std::fs::rename(dir.path().join(from), dir.path().join(to));
        let open = || {
            let info = table.open("a").unwrap().into_owned();
            let negotiated = Negotiated {
                export: "a".into(),
                style: HeaderStyle::Structured,
                allocation: false,
                block_sizes: false,
                size: info.size,
                flags: info.advertised(HeaderStyle::Structured),
                tls: false,
            };
            table.get(table.begin(&negotiated).unwrap().0).file
        };
        let first = open();
        rename("a", "c").and_then(|()| rename("b", "a")).unwrap();
        let second = open();
        assert_ne!(first, second);
        rename("a", "b").and_then(|()| rename("c", "a")).unwrap();
        assert_eq!([open(), open()], [first; 2], "it is back");
    }
}

#[test]
fn images_of_the_command_line_come_first() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for (dir, name, size) in [(&dir, "a", 1), (&dir, "b", 2), (&outside, "x", 3)] {
        File::create(dir.path().join(name)).unwrap().set_len(size).unwrap();
    }
    let image = format!("a={}", outside.path().join("x").display());
    let path = dir.path().to_str().unwrap();
    let args = ["nbd_server", "--image", &image, "--export-dir", path];
    let table = ExportTable::open(&Args::parse_from(args)).unwrap();
    let names: Vec<_> = table.list().into_iter().map(|listed| listed.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!([table.open(""), table.open("a"), table.open("b")].map(size), [3, 3, 2].map(Some));
}

#[test]
fn an_open_image_grows_with_its_file_by_whole_blocks() {
    let (dir, table) = folder(&[("a", 8192), ("odd", 5000)], &[]);
    let open = |name| size(table.open(name));
    assert_eq!([open("a"), open("odd")], [Some(8192), Some(5000)]);
    let set_len = |len| {
        for name in ["a", "odd"] {
            OpenOptions::new()
                .write(true)
                .open(dir.path().join(name))
                .unwrap()
                .set_len(len)
                .unwrap();
        }
    };
    set_len(20_000);
    assert_eq!(open("a"), Some(8192), "not before it is asked for");
    table.grow();
    assert_eq!([open("a"), size(table.find("a"))], [Some(16_384); 2]);
    assert_eq!(open("odd"), Some(5000), "its last block is written as far as it went");
    set_len(4096);
    table.grow();
    assert_eq!((open("a"), table.len()), (Some(16_384), 2), "no image shrinks");
}
