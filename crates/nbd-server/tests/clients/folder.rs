//! A folder of images: those that are there, those that come and go, and what is none.

use std::os::unix::fs::symlink;

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "folder_of_images", &[], images),
        trial("folder/come_and_go", &[], come_and_go),
        trial("folder/what_is_no_image", &[], no_images),
        trial("folder/locks", &[], locks),
        trial("folder/let_go", &[], let_go),
    ])
}

/// A folder with two images, and a server of it.
fn start(lab: &Lab, backend: Backend) -> Res<(Server, PathBuf)> {
    let dir = lab.path("images");
    fs::create_dir_all(&dir)?;
    image::with_parts(&dir.join("a.img"), 2 * MIB, 4, 1)?;
    image::sparse(&dir.join("b.img"), 4 * MIB)?;
    let server = Launch::new(lab, backend).arg("--export-dir").arg(&dir).start()?;
    Ok((server, dir))
}

/// What GO says of a name.
fn go(server: &Server, name: &str) -> Res<u32> {
    let mut client = server.greeted()?;
    client.info_or_go(opt::GO, name)
}

fn listed(server: &Server) -> Res<Vec<String>> {
    let mut client = server.greeted()?;
    client.send_option(opt::LIST, &[])?;
    let mut names = Vec::new();
    loop {
        match client.option_reply(opt::LIST)? {
            (rep::SERVER, data) => {
                let name = data[4..][..be32(&data) as usize].to_vec();
                names.push(String::from_utf8(name).map_err(|e| e.to_string())?);
            }
            (rep::ACK, _) => return Ok(names),
            (kind, _) => fail!("LIST: {kind:#x}"),
        }
    }
}

/// Each by its name; several clients, several images, all that was written is there at the end.
fn images(lab: &Lab, backend: Backend) -> Res {
    let (server, dir) = start(lab, backend)?;
    check!(listed(&server)? == ["a.img", "b.img"], "{:?}", listed(&server)?);
    let before = image::bytes_at(&dir.join("a.img"), 0, 1 << 20)?;
    let (mut a, mut b, mut again) =
        (server.client_of("a.img")?, server.client_of("b.img")?, server.client_of("a.img")?);
    check!((a.export.size, b.export.size) == (2 * MIB, 4 * MIB), "sizes");
    check!(a.read(0, 1 << 20)? == Ok(before), "a.img reads otherwise");
    a.write(4096, &[1; 8192], 0)?.ok("write")?;
    check!(again.read(4096, 8192)? == Ok(vec![1; 8192]), "another client sees something else");
    b.write(3 * MIB, &vec![2; MIB as usize], flag::FUA)?.ok("write with FUA")?;
    b.write(0, &[3; 4096], 0)?.ok("write")?;
    b.flush()?.ok("flush")?;
    // Only now, and served at once.
    image::sparse(&dir.join("c.img"), MIB)?;
    server.client_of("c.img")?.write(0, &[4; 4096], 0)?.ok("write")?;
    server.stop()?;
    for (name, offset, byte) in
        [("a.img", 4096, 1), ("b.img", 3 * MIB, 2), ("b.img", 0, 3), ("c.img", 0, 4)]
    {
        let bytes = image::bytes_at(&dir.join(name), offset, 4096)?;
        check!(bytes == [byte; 4096], "{name} at {offset} is not all {byte}");
    }
    Ok(())
}

/// A client keeps the image that it has open; a later client gets what has the name then.
fn come_and_go(lab: &Lab) -> Res {
    let (server, dir) = start(lab, Backend::Threads)?;
    let mut old = server.client_of("b.img")?;
    old.write(0, &[7; 4096], 0)?.ok("write")?;
    let new = dir.join(".new");
    image::sparse(&new, 8 * MIB)?;
    fs::rename(&new, dir.join("b.img"))?;
    let mut client = server.client_of("b.img")?;
    check!(client.export.size == 8 * MIB, "{} bytes", client.export.size);
    check!(client.read(0, 4096)? == Ok(vec![0; 4096]), "the new one has the old one's bytes");
    client.write(0, &[8; 4096], 0)?.ok("write")?;
    check!(old.read(0, 4096)? == Ok(vec![7; 4096]), "the old one has changed");
    check!(old.read(4 * MIB, 4096)? == Err(err::EINVAL), "the old one has grown");

    fs::remove_file(dir.join("b.img"))?;
    check!(listed(&server)? == ["a.img"], "{:?}", listed(&server)?);
    check!(go(&server, "b.img")? == rep::ERR_UNKNOWN, "it was removed");
    check!(client.read(0, 4096)? == Ok(vec![8; 4096]), "who has it open has lost it");
    check!(go(&server, "")? == rep::ERR_UNKNOWN, "a folder has no default");
    // The folder itself may be renamed.
    let moved = lab.path("moved");
    fs::rename(&dir, &moved)?;
    image::sparse(&moved.join("late.img"), MIB)?;
    check!(listed(&server)? == ["a.img", "late.img"], "{:?}", listed(&server)?);
    server.client_of("late.img")?.disconnect()?;
    server.stop()
}

/// Only regular files directly in the folder are exports. At the start the log names files whose names are not valid for
/// an export.
fn no_images(lab: &Lab) -> Res {
    let (secret, dir) = (lab.path("secret"), lab.path("images"));
    image::sparse(&secret, MIB)?;
    fs::create_dir(&dir)?;
    for name in ["two\nlines", ".hidden"] {
        image::sparse(&dir.join(name), MIB)?;
    }
    let mut server = start(lab, Backend::Threads)?.0;
    let log = server.logged("two\\nlines")?;
    check!(!log.contains("hidden"), "{log}");
    fs::create_dir(dir.join("sub"))?;
    image::sparse(&dir.join("sub/deep"), MIB)?;
    symlink("../secret", dir.join("out"))?;
    symlink("a.img", dir.join("link"))?;
    symlink("..", dir.join("up"))?;
    image::sparse(&dir.join("tab\there"), MIB)?;
    let _socket = UnixListener::bind(dir.join("socket"))?;
    lab.run_ok(Command::new("mkfifo").arg(dir.join("fifo")))?;
    check!(listed(&server)? == ["a.img", "b.img"], "{:?}", listed(&server)?);
    let absolute = secret.to_str().expect("temporary paths are UTF-8");
    for name in [
        ".",
        "..",
        "../secret",
        absolute,
        "out",
        "link",
        "up",
        "up/secret",
        "socket",
        "tab\there",
        "sub",
        "sub/deep",
        "sub/../a.img",
        "./a.img",
        "fifo",
        ".hidden",
        "a.img/",
        "a.img\n",
        "nope",
    ] {
        let kind = go(&server, name)?;
        check!(kind == rep::ERR_UNKNOWN, "{name:?} was answered {kind:#x}");
    }
    let descriptors = server.descriptors()?;
    check!(!descriptors.contains(&secret), "it has opened what is outside");
    check!(server.client_of("a.img")?.read(0, 512)?.is_ok(), "it goes on");
    server.still_runs()?;
    server.stop()?;
    // And no folder at all is an error at the start.
    for path in [lab.path("nosuch"), secret.clone()] {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Launch::threads(lab).arg("--export-dir").arg(&path).refused(1, &[&name])?;
    }
    Ok(())
}

/// An image of the folder is locked once a client uses it, not before. A client that finds it locked is refused.
fn locks(lab: &Lab) -> Res {
    let (server, dir) = start(lab, Backend::Threads)?;
    let mut looker = server.greeted()?;
    check!(looker.info_or_go(opt::INFO, "a.img")? == rep::ACK, "INFO");
    let other = |name: &str| Launch::threads(lab).socket(&lab.path("s2")).image(&dir.join(name));
    let owner = other("a.img").start()?;
    check!(go(&server, "a.img")? == rep::ERR_UNKNOWN, "it is in use by another server");
    server.logged("in use")?;
    owner.stop()?;
    server.client_of("a.img")?.write(0, &[1; 512], 0)?.ok("the other server is gone")?;
    other("a.img").refused(1, &["in use"])?;
    other("b.img").start()?.stop()?;
    server.stop()
}

/// Another server may take an image that no client has open any more, with all that was written. A client that
/// comes back gets what was written there.
fn let_go(lab: &Lab) -> Res {
    let dir = lab.path("images");
    fs::create_dir(&dir)?;
    image::sparse(&dir.join("a.img"), MIB)?;
    let server = Launch::threads(lab).arg("--export-dir").arg(&dir).start()?;
    let mut client = server.client_of("a.img")?;
    client.write(4096, &[1; 4096], 0)?.ok("a write that nobody flushes")?;
    client.disconnect()?;
    server.logged("let go")?;
    let owner = Launch::threads(lab).socket(&lab.path("s2")).image(&dir.join("a.img")).start()?;
    let mut other = owner.client()?;
    check!(other.read(4096, 4096)? == Ok(vec![1; 4096]), "what was written is not there");
    check!(go(&server, "a.img")? == rep::ERR_UNKNOWN, "it is another's now");
    other.write(4096, &[2; 4096], 0)?.ok("a write of the other")?;
    other.disconnect()?;
    owner.stop()?;
    let mut client = server.client_of("a.img")?;
    check!(client.read(4096, 4096)? == Ok(vec![2; 4096]), "what the other wrote is not seen");
    client.disconnect()?;
    server.stop()
}
