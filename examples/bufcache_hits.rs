//! Does the cache serve your workload? Replays a trace with caches of many sizes.
//!
//! ```text
//! cargo run --release --example bufcache_hits -- FILE [SVG]
//! ```

#[path = "bufcache_replay.rs"]
mod replay;

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use bufcache::Eviction;
use clap::Parser;
use testkit::replacement::{arc, lru, opt, s3_fifo};
use testkit::traces::Trace;

/// Rooms, in thousandths of the trace's blocks.
const ROOMS: [usize; 11] = [1, 2, 5, 10, 20, 50, 100, 200, 300, 500, 800];

type Failure = Box<dyn Error + Send + Sync>;

/// The hits of a cache with so many blocks.
type Hits = fn(&[u32], usize) -> Result<u64, Failure>;

/// The name, the colour of the curve, and the hits.
const POLICIES: [(&str, &str, Hits); 7] = [
    ("adaptive", "#c00", |keys, room| replay::hits(keys, room, Eviction::Adaptive)),
    ("A2", "#e80", |keys, room| replay::hits(keys, room, Eviction::A2)),
    ("clock", "#0a0", |keys, room| replay::hits(keys, room, Eviction::Clock)),
    ("LRU", "#06c", |keys, room| Ok(lru(keys, room))),
    ("ARC", "#80c", |keys, room| Ok(arc(keys, room))),
    ("S3-FIFO", "#088", |keys, room| Ok(s3_fifo(keys, room))),
    ("OPT", "#888", |keys, room| Ok(opt(keys, room))),
];

/// Replays a trace of block numbers with caches of many sizes.
///
/// Prints the hits in percent for each size: of the rules of bufcache, of least recently used (LRU), ARC and S3-FIFO,
/// and of OPT, which knows the future and which no cache can beat. Draws the same as curves.
#[derive(Parser)]
#[command(name = "bufcache_hits", version)]
struct Args {
    /// The trace, in the format of ARC (four numbers per line) or of LIRS (one per line); packed by zstd or gzip if
    /// its name ends so.
    file: PathBuf,
    /// Draw the curves into this file.
    #[arg(default_value = "hits.svg")]
    svg: PathBuf,
}

fn main() -> Result<(), Failure> {
    let Args { file, svg } = Args::parse();
    let trace = Trace::read(&file)?;
    if trace.keys.is_empty() {
        return Err(format!("{} has no requests", file.display()).into());
    }
    println!("{}: {} requests for {} blocks", trace.name, trace.keys.len(), trace.blocks);
    let mut rooms = ROOMS.map(|part| (trace.blocks * part / 1000).max(1)).to_vec();
    rooms.dedup();
    let table = measure(&trace, &rooms)?;

    print!("{:>10}", "blocks");
    POLICIES.iter().for_each(|(name, ..)| print!("{name:>10}"));
    println!();
    for (room, row) in rooms.iter().zip(&table) {
        print!("{room:>10}");
        row.iter().for_each(|hits| print!("{hits:>10.1}"));
        println!();
    }
    std::fs::write(&svg, draw(&trace, &rooms, &table))?;
    println!("curves: {}", svg.display());
    Ok(())
}

/// Hits in percent, by room and policy. Each thread takes the next pair of these that none has taken.
fn measure(trace: &Trace, rooms: &[usize]) -> Result<Vec<Vec<f64>>, Failure> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(vec![vec![0.0; POLICIES.len()]; rooms.len()]);
    let work = || -> Result<(), Failure> {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (row, column) = (at / POLICIES.len(), at % POLICIES.len());
            let Some(&room) = rooms.get(row) else { return Ok(()) };
            let hits = POLICIES[column].2(&trace.keys, room)?;
            let percent = 100.0 * hits as f64 / trace.keys.len() as f64;
            results.lock().unwrap_or_else(PoisonError::into_inner)[row][column] = percent;
        }
    };
    thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| Failure::from("a replay panicked"))?)
    })?;
    Ok(results.into_inner().unwrap_or_else(PoisonError::into_inner))
}

/// The curves: rooms on a logarithmic axis.
fn draw(trace: &Trace, rooms: &[usize], table: &[Vec<f64>]) -> String {
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 400.0;
    const MARGIN: f64 = 50.0;
    let (least, most) = (rooms[0] as f64, rooms[rooms.len() - 1] as f64);
    let span = (most / least).ln().max(f64::MIN_POSITIVE);
    let x = |room: usize| MARGIN + (room as f64 / least).ln() / span * WIDTH;
    let y = |percent: f64| MARGIN + (1.0 - percent / 100.0) * HEIGHT;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"white\"/>\n<text x=\"{MARGIN}\" y=\"25\">{}: hits in percent, by blocks in the \
         cache</text>\n",
        WIDTH + 3.0 * MARGIN,
        HEIGHT + 2.0 * MARGIN,
        trace.name.replace(['<', '>', '&'], "_"),
    );
    let mut add = |line: std::fmt::Arguments| writeln!(svg, "{line}").expect("a string takes it");
    for percent in [0.0, 20.0, 40.0, 60.0, 80.0, 100.0] {
        let (y, end) = (y(percent), MARGIN + WIDTH);
        add(format_args!("<path d=\"M{MARGIN} {y}H{end}\" stroke=\"#ddd\"/>"));
        add(format_args!("<text x=\"15\" y=\"{}\">{percent}</text>", y + 4.0));
    }
    for &room in rooms {
        let (x, y) = (x(room), MARGIN + HEIGHT + 18.0);
        add(format_args!("<text x=\"{x:.0}\" y=\"{y}\" text-anchor=\"middle\">{room}</text>"));
    }
    for (at, (name, colour, _)) in POLICIES.iter().enumerate() {
        let points: Vec<String> = rooms
            .iter()
            .zip(table)
            .map(|(&room, row)| format!("{:.1},{:.1}", x(room), y(row[at])))
            .collect();
        let points = points.join(" ");
        let (x, y) = (MARGIN + WIDTH + 10.0, MARGIN + 20.0 * at as f64);
        add(format_args!(
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        ));
        add(format_args!("<text x=\"{x}\" y=\"{y}\" fill=\"{colour}\">{name}</text>"));
    }
    svg.push_str("</svg>\n");
    svg
}
