//! Every short example and every recipe runs to its end: each checks its own results.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs};

use rustix::process::{Pid, Signal, kill_process};

type Outcome = Result<(), Box<dyn Error>>;

/// The short examples and the recipes, which take no argument: the sources that have a `main`.
fn without_arguments() -> Result<Vec<String>, Box<dyn Error>> {
    let (mut names, folder) = (Vec::new(), Path::new(env!("CARGO_MANIFEST_DIR")));
    for entry in fs::read_dir(folder)?.chain(fs::read_dir(folder.join("recipes"))?) {
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
    assert!(names.len() >= 22, "{names:?}");
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
fn the_gain_of_each_part_of_the_policy_is_printed() -> Outcome {
    let folder = tempfile::tempdir()?;
    let (trace, picture) = (folder.path().join("mixed.lirs"), folder.path().join("hits.svg"));
    // A loop of 1,000 blocks between those of a scan, of which each comes twice.
    let keys: String = (0..40_000)
        .map(|at| format!("{}\n", if at % 2 == 0 { at / 2 % 1_000 } else { 1_000 + at / 4 }))
        .collect();
    fs::write(&trace, keys)?;
    let mut command = Command::new(program("bufcache_hits")?);
    let printed = output(command.args([&trace, &picture]).arg("--parts"))?;
    // The columns of the rooms of 550 and 1,100 blocks.
    let row = |first: &str| -> Option<[f64; 2]> {
        let rest = printed.lines().find_map(|line| line.strip_prefix(first))?;
        let numbers: Vec<f64> =
            rest.split_whitespace().map_while(|word| word.parse().ok()).collect();
        numbers.get(5..7)?.try_into().ok()
    };
    assert_eq!(row("gains in points, by blocks"), Some([550.0, 1100.0]), "{printed}");
    let gains = |part| row(part).ok_or_else(|| format!("no {part:?} in\n{printed}"));
    assert!(gains("adaptive, over clock")?[0] > 10.0, "{printed}");
    for (part, least) in [
        ("A2: main is filled first", 0.5),
        ("A2: early hits do not count", 10.0),
        ("A2Small: a tenth of the probation", 0.5),
    ] {
        assert!(gains(part)?[0] > least, "{part}: {printed}");
    }
    for part in ["A2 simulated, over the cache's", "A2Small simulated, over the cache's"] {
        let far = gains(part)?;
        assert!(far.iter().all(|points| points.abs() < 1.0), "{printed}");
    }
    Ok(())
}

#[test]
fn what_keeps_a_trace_from_its_replay_is_told_in_a_sentence() -> Outcome {
    let folder = tempfile::tempdir()?;
    let (trace, picture) = (folder.path().join("bad.lirs"), folder.path().join("hits.svg"));
    let fails = |trace: &Path, picture: &Path| -> Result<String, Box<dyn Error>> {
        let output = Command::new(program("bufcache_hits")?).args([trace, picture]).output()?;
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(1), &[][..]));
        Ok(String::from_utf8(output.stderr)?)
    };
    let named = trace.display();
    for (text, error) in [
        ("7\n0 100000000000 0 0\n", ":2: the trace has more than 67108864 requests"),
        ("0 18446744073709551615 0 0\n", ":1: the trace has more than 67108864 requests"),
        (
            "# one\n  # two\n1 2\n",
            ":3: \"1 2\" is neither one number of 64 bits nor four of them\n",
        ),
        ("# nothing\n", " has no requests\n"),
    ] {
        fs::write(&trace, text)?;
        let said = fails(&trace, &picture)?;
        assert!(said.starts_with(&format!("bufcache_hits: {named}{error}")), "{said}");
        assert!(!picture.exists(), "it was not replayed");
    }
    // The picture is created before the replay: this one would take minutes.
    fs::write(&trace, "0 1000000 0 0\n".repeat(4))?;
    let picture = folder.path().join("missing").join("hits.svg");
    let begin = Instant::now();
    let expected =
        format!("bufcache_hits: {}: No such file or directory (os error 2)\n", picture.display());
    assert_eq!(fails(&trace, &picture)?, expected);
    assert!(begin.elapsed() < Duration::from_secs(60));
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
