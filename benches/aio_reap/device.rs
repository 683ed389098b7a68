//! The devices that are read: a file on a RAM disk that this bench sets up, and a file on the disk of the
//! temporary folder.
//!
//! The RAM disk is a zram device of its own with ext2 on it. A shell takes it down when the pipe to it
//! closes: at the end of the guard, and also when this process is killed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use harness::Random;
use tempfile::TempDir;

/// The size and alignment of every read, in bytes.
pub(crate) const BLOCK: usize = 4096;
/// Size of the file; a RAM disk has some room beside it.
const BYTES: u64 = 128 << 20;

/// A file of which every block was written, for direct reads.
pub(crate) struct Device {
    /// The name in the tables.
    pub(crate) name: &'static str,
    pub(crate) path: PathBuf,
    /// Goes before the folder in which it is mounted.
    _ram: Option<RamDisk>,
    pub(crate) scratch: TempDir,
}

impl Device {
    /// ext2 on zram. Only root can have it.
    pub(crate) fn ram() -> io::Result<Self> {
        let scratch = tempfile::tempdir()?;
        let mount = scratch.path().join("disk");
        fs::create_dir(&mount)?;
        let ram = RamDisk::new(scratch.path(), &mount)?;
        let path = fill(&mount, Content::Word)?;
        Ok(Self { name: "ext2 on zram", path, scratch, _ram: Some(ram) })
    }

    /// The file system of the temporary folder.
    pub(crate) fn disk() -> io::Result<Self> {
        let scratch = tempfile::tempdir()?;
        if rustix::fs::statfs(scratch.path())?.f_type == libc::TMPFS_MAGIC {
            let why = "the temporary folder is no disk: set TMPDIR to one on a disk";
            return Err(io::Error::new(ErrorKind::Unsupported, why));
        }
        let path = fill(scratch.path(), Content::Noise)?;
        Ok(Self { name: "disk", path, scratch, _ram: None })
    }

    /// Blocks of the file.
    pub(crate) fn blocks(&self) -> u64 {
        BYTES / BLOCK as u64
    }
}

/// Opens `path` for direct reads.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path)
}

/// The content of a block.
#[derive(Clone, Copy)]
enum Content {
    /// One word all over, which zram keeps instead of the block: a read fills a page, which is the
    /// least that a RAM disk can do. Anything else it would have to unpack or look up.
    Word,
    /// Bytes that no device can compress, so that a read of any block moves all of them.
    Noise,
}

/// Writes the file.
fn fill(folder: &Path, content: Content) -> io::Result<PathBuf> {
    let path = folder.join("blocks");
    let mut file = File::create(&path)?;
    let mut random = Random::new(1);
    let mut block = [0; BLOCK];
    let mut writer = BufWriter::with_capacity(1 << 20, &mut file);
    for _ in 0..BYTES / BLOCK as u64 {
        let word = random.next();
        for place in block.chunks_exact_mut(8) {
            let word = if matches!(content, Content::Word) { word } else { random.next() };
            place.copy_from_slice(&word.to_ne_bytes());
        }
        writer.write_all(&block)?;
    }
    writer.flush()?;
    drop(writer);
    file.sync_all()?;
    open(&path)?; // fails where the file system has no direct reads
    Ok(path)
}

const CONTROL: &str = "/sys/class/zram-control";

/// A mounted zram device.
struct RamDisk {
    janitor: Child,
}

impl RamDisk {
    fn new(scratch: &Path, mount: &Path) -> io::Result<Self> {
        let add = Path::new(CONTROL).join("hot_add");
        let number = fs::read_to_string(&add)
            .map_err(|error| io::Error::new(error.kind(), format!("no zram device: {error}")))?;
        let number = number.trim();
        // From here on it goes away whatever happens.
        let disk = Self { janitor: janitor(number, scratch, mount)? };
        let device = format!("/dev/zram{number}");
        fs::write(format!("/sys/block/zram{number}/disksize"), (BYTES + BYTES / 4).to_string())?;
        let block = BLOCK.to_string();
        succeed(Command::new("mkfs.ext2").args(["-q", "-F", "-m", "0", "-b", &block, &device]))?;
        succeed(Command::new("mount").args(["-t", "ext2", &device]).arg(mount))?;
        Ok(disk)
    }
}

impl Drop for RamDisk {
    fn drop(&mut self) {
        drop(self.janitor.stdin.take());
        let start = Instant::now();
        // Beyond that something in this process has a file open there: it goes on when that ends.
        while start.elapsed() < Duration::from_secs(5) {
            if !matches!(self.janitor.try_wait(), Ok(None)) {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A shell that waits for its input to end, and then takes the device down and removes the folder. What the
/// terminal sends to the bench does not end it.
fn janitor(number: &str, scratch: &Path, mount: &Path) -> io::Result<Child> {
    // A process that still has a file open there may take a moment to end.
    let script = r#"
        trap "" HUP
        read -r _
        for _ in $(seq 200); do
            if mountpoint -q "$2" && ! umount "$2" 2>/dev/null; then
                sleep 0.3
                continue
            fi
            echo 1 > "/sys/block/zram$1/reset" && echo "$1" > "$3/hot_remove" && rm -rf "$4" && exit 0
            sleep 0.3
        done
        echo "the RAM disk on $2 was not taken down" >&2
    "#;
    let mut command = Command::new("sh");
    command.args(["-c", script, "sh", number]).arg(mount).arg(CONTROL).arg(scratch);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).process_group(0);
    command.spawn()
}

fn succeed(command: &mut Command) -> io::Result<()> {
    let output = command.stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{:?}: {}", command.get_program(), said.trim())))
}
