//! Whole images through `qemu-img`, `nbdcopy` and fio, and back.

use crate::lab::*;

/// The size of the images that are copied.
const SIZE: u64 = 256 * MIB;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "qemu_img_convert_compare", &[Need::QemuImg], convert),
        per_backend(ALL, "nbdcopy_connections", &[Need::NbdCopy], nbdcopy),
        per_backend(ALL, "fio_verify_crc32c", &[Need::Fio], fio_verify),
    ])
}

fn qemu_img<'a>(lab: &Lab, args: impl IntoIterator<Item = &'a str>) -> Res<String> {
    lab.run_ok(Command::new("qemu-img").args(args))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("temporary paths are UTF-8")
}

/// A 256 MiB image goes in over old data, is compared, and comes out again.
fn convert(lab: &Lab, backend: Backend) -> Res {
    let (source, image, back) = (lab.path("src.img"), lab.path("a.img"), lab.path("back.img"));
    image::with_parts(&source, SIZE, 48, 2)?;
    image::with_parts(&image, SIZE, 32, 3)?; // old data that zeroes of the source must replace
    let server = Launch::new(lab, backend).image(&image).start()?;
    let uri = server.uri("vol");

    qemu_img(
        lab,
        ["convert", "-n", "-W", "-m", "8", "-f", "raw", "-O", "raw", text(&source), &uri],
    )?;
    qemu_img(lab, ["compare", "-f", "raw", "-F", "raw", text(&source), &uri])?;
    qemu_img(lab, ["convert", "-f", "raw", "-O", "raw", &uri, text(&back)])?;
    qemu_img(lab, ["compare", "-f", "raw", "-F", "raw", &uri, text(&back)])?;
    server.stop()?;
    image::same(&source, &image)?;
    image::same(&source, &back)
}

/// nbdcopy over four connections: in, out, and from one export to another.
fn nbdcopy(lab: &Lab, backend: Backend) -> Res {
    let (source, back) = (lab.path("src.img"), lab.path("back.img"));
    let (first, second) = (lab.path("a.img"), lab.path("b.img"));
    image::with_parts(&source, SIZE, 48, 4)?;
    image::with_parts(&first, SIZE, 32, 5)?;
    image::with_parts(&second, SIZE, 32, 6)?;
    let server = Launch::new(lab, backend).image(&first).image_as("two", &second).start()?;
    let (one, two) = (server.uri("vol"), server.uri("two"));
    let copy = |from: &str, to: &str| {
        let options = ["--connections=4", "--threads=4", "--requests=16", "--flush"];
        lab.run_ok(Command::new("nbdcopy").args(options).args([from, to]))
    };
    copy(text(&source), &one)?;
    copy(&one, text(&back))?;
    copy(&one, &two)?;
    server.stop()?;
    image::same(&source, &first)?;
    image::same(&source, &back)?;
    image::same(&source, &second)
}

/// A fio command on export `vol` through its nbd engine.
pub(crate) fn fio(server: &Server, args: &[&str]) -> Command {
    let mut command = Command::new("fio");
    command.args(["--name=nbd", "--ioengine=nbd", "--verify_state_save=0"]);
    command.arg(format!("--uri={}", server.uri("vol"))).args(args);
    command
}

/// Random writes from two connections, every block verified by its crc32c.
fn fio_verify(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 32 * MIB)?;
    let server = Launch::new(lab, backend).image(&image).start()?;
    let args = [
        "--rw=randwrite",
        "--bs=4k",
        "--iodepth=16",
        "--size=16M",
        "--numjobs=2",
        "--offset_increment=16M",
        "--verify=crc32c",
        "--do_verify=1",
        "--verify_fatal=1",
    ];
    let text = lab.run_ok(&mut fio(&server, &args))?;
    // Each job writes and reads back all of its 4096 blocks.
    let issued = text.lines().filter(|l| l.contains("issued rwts: total=4096,4096")).count();
    check!(issued == 2, "not every block was written and verified:\n{text}");
    server.stop()?;
    let start = image::bytes_at(&image, 0, 4096)?;
    check!(start.iter().any(|&b| b != 0), "the image is still empty");
    Ok(())
}
