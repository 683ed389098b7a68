//! Starting: what is refused with a message, how the sockets are made, which server may open an image.

use crate::lab::*;
use crate::server;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("startup/unreadable_image", &[], unreadable_image),
        trial("startup/size_creates_image", &[], size_creates),
        trial("startup/failed_size_leaves_no_image", &[], failed_size),
        trial("startup/stale_socket", &[], stale_socket),
        trial("startup/second_writer_refused", &[], second_writer),
        trial("startup/two_names_one_file", &[], two_names),
        trial("images/readonly_option", &[], readonly_option),
        trial("startup/help_and_readme_agree", &[], help),
        trial("startup/uring_refused", &[Need::Strace], uring_refused),
    ])
}

/// `--help` is a manual; and every option of ours that the README's commands have is in it.
fn help(lab: &Lab) -> Res {
    let help = lab.run_ok(Command::new(server::binary()).arg("--help"))?;
    for section in ["Usage:", "DURABILITY", "SIGNALS", "EXIT STATUS", "EXAMPLES"] {
        check!(help.contains(section), "no {section}:\n{help}");
    }
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/README.md");
    let readme = fs::read_to_string(readme)?;
    let (mut ours, mut found) = (false, 0);
    for line in readme.lines().chain(help.lines()) {
        // A command may go on in the next line.
        ours = line.trim_start().starts_with("offlock-nbd ") || (ours && line.ends_with('\\'));
        for option in line.split_whitespace().filter(|word| ours && word.starts_with("--")) {
            found += 1;
            check!(
                help.contains(&format!("      {option} <"))
                    || help.contains(&format!("      {option}\n")),
                "{option} is no option: {line}"
            );
        }
    }
    check!(found > 8, "only {found} options in the README's commands");
    let short = lab.run_ok(Command::new(server::binary()).arg("-h"))?;
    check!(short.lines().count() < 60, "-h is no summary:\n{short}");
    Ok(())
}

/// A directory, and (unless root, which may read everything) a file without permissions.
fn unreadable_image(lab: &Lab) -> Res {
    let dir = lab.path("a-directory");
    fs::create_dir(&dir)?;
    Launch::threads(lab).image(&dir).refused(1, &["a-directory"])?;

    let file = lab.path("locked.img");
    image::sparse(&file, MIB)?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000))?;
    if fs::File::open(&file).is_err() {
        Launch::threads(lab).image(&file).refused(1, &["locked.img", "ermission denied"])?;
    }
    Ok(())
}

fn size_creates(lab: &Lab) -> Res {
    let image = lab.path("new.img");
    let server = Launch::threads(lab).image(&image).with("--size 24M").start()?;
    let client = server.client()?;
    check!(client.export.size == 24 * MIB, "{} bytes", client.export.size);
    server.serves_to_the_end()?;
    check!(fs::metadata(&image)?.len() == 24 * MIB, "the file's size");
    Ok(())
}

/// Where the file cannot be made as large as `--size` says, the server ends with an error and leaves no
/// file. The limit on the size of files stands for a full disk; by default the kernel also sends SIGXFSZ.
fn failed_size(lab: &Lab) -> Res {
    let limited = |ignore: &str| {
        ["sh", "-c", &format!("{ignore} ulimit -f 64; exec \"$0\" \"$@\"")].map(String::from)
    };
    let soft = lab.path("soft.img");
    std::os::unix::fs::symlink("target.img", &soft)?;
    for (image, left) in [(lab.path("new.img"), "new.img"), (soft, "target.img")] {
        for ignore in ["trap '' XFSZ;", ""] {
            let launch = Launch::threads(lab).through(limited(ignore));
            launch.image(&image).with("--size 24M").refused(1, &["img", "File too large"])?;
            check!(!lab.path(left).exists(), "{left} is left, {ignore:?}");
        }
    }
    // A file that was there before stays, at its old size.
    let old = lab.path("old.img");
    image::sparse(&old, 4096)?;
    let launch = Launch::threads(lab).through(limited(""));
    launch.image(&old).with("--size 24M").refused(1, &["old.img"])?;
    check!(fs::metadata(&old)?.len() == 4096, "the old image has another size");
    Ok(())
}

/// A socket file left by a killed server does not keep the next one from starting; a socket in use does. The same for
/// that of the metrics, which only its user may open.
fn stale_socket(lab: &Lab) -> Res {
    let launch = |socket: &str| Launch::bare(lab).on_socket(socket).sparse(MIB);
    drop(launch("s")?.metrics().start()?); // SIGKILL: the files stay
    let files = ["s", "metrics"].map(|name| lab.path(name));
    check!(files.iter().all(|file| file.exists()), "the killed server had no socket files");
    let server = launch("s")?.metrics().start()?;
    let mode = fs::metadata(&files[1])?.permissions().mode() & 0o777;
    check!(mode == 0o600, "mode {mode:o}");
    let other = lab.path("b.img");
    image::sparse(&other, MIB)?;
    let other = |socket: &str| Launch::bare(lab).on_socket(socket).image(&other);
    for (launch, file) in [(other("s"), &files[0]), (other("s2").metrics(), &files[1])] {
        launch.refused(1, &[&file.to_string_lossy()])?;
    }
    server.figures()?;
    server.serves_to_the_end()?;
    let left = files.iter().chain([&lab.path("s2")]).any(|file| file.exists());
    check!(!left, "a socket is left");
    Ok(())
}

/// The lock on an open file keeps a second server from writing and from changing its size, unless told `--no-lock`; it
/// is gone with the first server, however that ends.
fn second_writer(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, MIB)?;
    let first = Launch::threads(lab).image(&image).start()?;
    let second = || Launch::threads(lab).socket(&lab.path("s2")).image(&image);
    for launch in [second(), second().with("--size 8M")] {
        launch.refused(1, &["a.img", "lock", "in use"])?;
    }
    let len = fs::metadata(&image)?.len();
    check!(len == MIB, "the refused server changed the size from {MIB} to {len}");
    // The refused one did not harm the first.
    check!(first.client()?.read(0, 4096)?.is_ok(), "the first server");
    second().arg("--no-lock").start()?.stop()?;
    drop(first); // SIGKILL
    second().with("--size 8M").start()?.stop()?;
    check!(fs::metadata(&image)?.len() == 8 * MIB, "not grown although free");
    Ok(())
}

/// One image by its path, a symbolic link and a hard link: one open file, one content.
fn two_names(lab: &Lab) -> Res {
    let (image, soft, hard) = (lab.path("a.img"), lab.path("soft.img"), lab.path("hard.img"));
    image::sparse(&image, MIB)?;
    std::os::unix::fs::symlink(&image, &soft)?;
    fs::hard_link(&image, &hard)?;
    let launch = || Launch::threads(lab).image(&image);
    let open = |server: &Server| -> Res<Vec<PathBuf>> {
        let is_image = |p: &PathBuf| p.extension() == Some("img".as_ref());
        Ok(server.descriptors()?.into_iter().filter(is_image).collect())
    };
    // Workers may each have a duplicate; more names must not mean more of them.
    let server = launch().start()?;
    let by_one_name = open(&server)?;
    server.stop()?;
    let server = launch().image_as("soft", &soft).image_as("hard", &hard).start()?;
    let by_three = open(&server)?;
    check!(by_three.len() == by_one_name.len(), "{by_three:?}, by one name {by_one_name:?}");
    check!(by_three.iter().all(|p| *p == image), "opened under several names: {by_three:?}");
    let data = vec![0x7e; 4096];
    server.client()?.write(0, &data, 0)?.ok("write")?;
    for name in ["soft", "hard", ""] {
        let mut client = server.client_of(name)?;
        check!(client.read(0, 4096)? == Ok(data.clone()), "export {name:?} shows other bytes");
        client.disconnect()?;
    }
    server.stop()
}

/// One name for writing, one for reading, in either order.
fn readonly_option(lab: &Lab) -> Res {
    let path = lab.path("a,b.img");
    image::sparse(&path, MIB)?;
    let escaped = path.to_str().expect("temporary paths are UTF-8").replace(',', ",,");
    let (write, read) = (format!("w={escaped}"), format!("r={escaped},readonly"));
    for (first, second) in [(&write, &read), (&read, &write)] {
        let launch = Launch::bare(lab).on_socket("s").arg("--image").arg(first);
        let server = launch.arg("--image").arg(second).start()?;
        let (mut writer, mut reader) = (server.client_of("w")?, server.client_of("r")?);
        writer.write(0, &[3; 4096], 0)?.ok("write")?;
        check!(reader.read(0, 4096)? == Ok(vec![3; 4096]), "the reader sees other bytes");
        reader.write(0, &[4; 4096], 0)?.is(err::EPERM, "a write to the export for reading")?;
        server.stop()?;
    }
    // Without a name for writing the file is not even opened for it, nor locked for it.
    let launch = |socket| {
        let launch = Launch::bare(lab).on_socket(socket).arg("--image").arg(&read);
        launch.start()
    };
    let (first, second) = (launch("s")?, launch("s2")?);
    first.stop()?;
    second.stop()
}

/// Where the kernel refuses io_uring, `auto` takes another backend and says why, and `uring` is refused with the reason.
fn uring_refused(lab: &Lab) -> Res {
    let is_told = |log: &str| {
        log.lines().any(|line| line.contains("uring") && line.contains("not permitted"))
    };
    let launch = Launch::bare(lab).sparse(4 * MIB)?.with("--backend auto");
    let mut server = launch.on_socket("s").without_uring().start()?;
    let log = server.logged("not permitted")?;
    check!(is_told(&log), "no line names io_uring and the reason:\n{log}");
    check!(!log.contains("backend=uring"), "it runs on io_uring all the same:\n{log}");
    server.still_serves()?;
    let mut client = server.client()?;
    client.flush()?.ok("FLUSH")?;
    client.plain(cmd::WRITE_ZEROES, 0, MIB, MIB)?.ok("zeroes")?;
    client.disconnect()?;
    server.stop()?;

    let launch = Launch::new(lab, Backend::Uring).sparse(4 * MIB)?.without_uring();
    launch.refused(1, &["uring", "not permitted"]).map(drop)
}
