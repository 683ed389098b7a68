//! Every short example runs to its end: each checks its own results.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use rustix::process::{Pid, Signal, kill_process};

type Outcome = Result<(), Box<dyn Error>>;

/// The short examples, which take no argument: the sources beside this package's manifest that have a `main`.
fn without_arguments() -> Result<Vec<String>, Box<dyn Error>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(env!("CARGO_MANIFEST_DIR"))? {
        let path = entry?.path();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if is_source && fs::read_to_string(&path)?.contains("\nfn main() ") {
            names.extend(path.file_stem().and_then(|name| name.to_str()).map(String::from));
        }
    }
    names.retain(|name| !["bufcache_hits", "copy_tree", "pubsub"].contains(&name.as_str()));
    Ok(names)
}

/// The example as it was built beside this test.
fn program(name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let me = env::current_exe()?;
    let profile = me.parent().and_then(Path::parent).ok_or("the test has no build folder")?;
    let path = profile.join("examples").join(name);
    if path.is_file() {
        return Ok(path);
    }
    Err(format!("{} does not exist: cargo build -p examples --examples", path.display()).into())
}

/// Runs a program and returns what it prints.
fn output(command: &mut Command) -> Result<String, Box<dyn Error>> {
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        return Err(format!("{command:?}: {}\n{said}", output.status).into());
    }
    Ok(String::from_utf8(output.stdout)?)
}

#[test]
fn each_short_example_finds_its_results_right() -> Outcome {
    let names = without_arguments()?;
    assert!(names.len() >= 17, "{names:?}");
    for name in names {
        assert!(!output(&mut Command::new(program(&name)?))?.is_empty(), "{name} prints nothing");
    }
    Ok(())
}

#[test]
fn the_hits_of_a_trace_are_printed_and_drawn() -> Outcome {
    let folder = tempfile::tempdir()?;
    let (trace, picture) = (folder.path().join("loop.lirs"), folder.path().join("hits.svg"));
    // A loop over 1,000 blocks: with room for half of them LRU has no hit, and OPT has nearly half.
    let keys: String = (0..20_000).map(|at| format!("{}\n", at % 1_000)).collect();
    fs::write(&trace, keys)?;
    let printed = output(Command::new(program("bufcache_hits")?).arg(&trace).arg(&picture))?;
    let row = |first: &str| printed.lines().find(|line| line.trim_start().starts_with(first));
    let columns = |line: &str| line.split_whitespace().map(String::from).collect::<Vec<_>>();
    let names = columns(row("blocks ").ok_or("no heading")?);
    let hits = columns(row("500 ").ok_or("no row of 500 blocks")?);
    let of = |name: &str| names.iter().position(|there| there == name).map(|at| hits[at].as_str());
    assert_eq!((of("LRU"), of("OPT")), (Some("0.0"), Some("47.5")), "{printed}");
    assert!(fs::read_to_string(&picture)?.starts_with("<svg"));
    Ok(())
}

#[test]
fn a_directory_is_copied() -> Outcome {
    let folder = tempfile::tempdir()?;
    let [from, to] = ["from", "to"].map(|name| folder.path().join(name));
    fs::create_dir(&from)?;
    fs::write(from.join("file"), "text")?;
    let printed = output(Command::new(program("copy_tree")?).args([&from, &to]))?;
    assert_eq!(printed, "1 files, 1 directories, 0 links, 4 B, 0 errors\n");
    assert_eq!(fs::read_to_string(to.join("file"))?, "text");
    // The copy exists now.
    assert!(output(Command::new(program("copy_tree")?).args([&from, &to])).is_err());
    Ok(())
}

#[test]
fn messages_are_published_until_an_interrupt() -> Outcome {
    let mut server = Command::new(program("pubsub")?)
        .args(["127.0.0.1:0", "--clients", "1"])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut printed = BufReader::new(server.stdout.take().ok_or("no output")?).lines();
    let first = printed.next().ok_or("it prints nothing")??;
    let address = first.strip_prefix("listening on ").ok_or("no address")?;
    let mut client = TcpStream::connect(address)?;
    client.write_all(b"SUB t\nPUB 3 t text\nQUIT\n")?;
    let answers = BufReader::new(client).lines().collect::<Result<Vec<_>, _>>()?;
    let id = answers[0].strip_prefix("HELLO ").ok_or("no id")?;
    assert!(answers.contains(&format!("MSG t 3 {id} text")), "{answers:?}");
    kill_process(Pid::from_child(&server), Signal::INT)?;
    assert!(server.wait()?.success());
    assert_eq!(printed.next().ok_or("no sum")??, "1 messages: 1 queued, 0 dropped");
    Ok(())
}
