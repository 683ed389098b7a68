//! The picture of the repository's first page: bars of the rows that decide a target.
//!
//! The colours follow the reader's scheme, light or dark, by a style sheet inside the picture.

use std::fmt::{self, Write};

use crate::rows::Row;
use crate::servers::{NBDKIT, OURS, QEMU};

const WIDTH: f64 = 760.0;
/// Where the bars begin; the names of the rows stand before them.
const BARS: f64 = 250.0;
/// The longest bar; its figure stands behind it.
const LONGEST: f64 = 430.0;
const BAR: f64 = 15.0;
const HEAD: f64 = 62.0;
const STYLE: &str = "text{font:13px system-ui,sans-serif;fill:#1f2328}.title{font-weight:600;\
    font-size:15px}.quiet{fill:#59636e}.a{fill:#2a78d6}.b{fill:#c9793f}.c{fill:#8c959f}\
    @media(prefers-color-scheme:dark){text{fill:#f0f6fc}.quiet{fill:#9198a1}}";
/// The servers, their names in the picture, and their classes in the style sheet.
const SERVERS: [(&str, &str, &str); 3] =
    [(OURS, "nbd_server", "a"), (QEMU, "qemu-nbd, io_uring", "b"), (NBDKIT, "nbdkit file", "c")];

/// Rows in which all three servers were measured.
pub(crate) struct Picture<'a> {
    rows: Vec<(&'a Row, [f64; 3])>,
}

impl<'a> Picture<'a> {
    /// Takes those of `rows` that decide a target, and in which all servers were measured.
    pub(crate) fn new(rows: &'a [Row]) -> Self {
        let reads = |row: &Row, name| {
            let server = row.servers.iter().position(|server| *server == name)?;
            row.median(server, |window| window.reads.iops)
        };
        let rows = rows.iter().filter(|row| row.load.target.is_some()).filter_map(|row| {
            let [ours, qemu, nbdkit] = SERVERS.map(|(name, ..)| reads(row, name));
            Some((row, [ours?, qemu?, nbdkit?]))
        });
        Self { rows: rows.collect() }
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = BAR * 3.0 + 14.0;
        let height = HEAD + place * self.rows.len() as f64;
        let most = self.rows.iter().flat_map(|(_, reads)| reads).copied().fold(1.0, f64::max);
        writeln!(
            f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n<style>{STYLE}</style>\n\
             <text x=\"8\" y=\"20\" class=\"title\">Thousands of reads per second of a cached image, \
             over NBD</text>"
        )?;
        let mut at = 8.0;
        for (_, name, class) in SERVERS {
            writeln!(
                f,
                "<rect x=\"{at}\" y=\"34\" width=\"11\" height=\"11\" rx=\"2\" class=\"{class}\"/>\
                 <text x=\"{}\" y=\"44\" class=\"quiet\">{name}</text>",
                at + 16.0
            )?;
            at += 34.0 + 7.0 * name.len() as f64;
        }
        for (place_of, (row, reads)) in self.rows.iter().enumerate() {
            let top = HEAD + place * place_of as f64;
            let (load, requests) = name(row);
            writeln!(
                f,
                "<text x=\"8\" y=\"{}\">{load}</text><text x=\"8\" y=\"{}\" class=\"quiet\">\
                 {requests}</text>",
                top + BAR * 1.2,
                top + BAR * 2.3
            )?;
            for (server, (reads, (_, name, class))) in reads.iter().zip(SERVERS).enumerate() {
                let y = top + BAR * server as f64;
                let wide = (LONGEST * reads / most).max(1.0);
                writeln!(
                    f,
                    "<rect x=\"{BARS}\" y=\"{y}\" width=\"{wide:.1}\" height=\"{}\" rx=\"2\" \
                     class=\"{class}\"><title>{name}</title></rect>\
                     <text x=\"{:.1}\" y=\"{}\" class=\"quiet\">{:.0}</text>",
                    BAR - 3.0,
                    BARS + wide + 6.0,
                    y + BAR - 4.0,
                    reads / 1e3
                )?;
            }
        }
        writeln!(f, "</svg>")
    }
}

/// A row in words, on two lines.
fn name(row: &Row) -> (String, String) {
    let load = &row.load;
    let order = if load.rw == "read" { "in sequence" } else { "at random" };
    let size = load.block.replace('k', " KiB");
    let mut requests = format!("{} at once", load.depth);
    if load.connections > 1 {
        write!(requests, ", {} connections", load.connections).expect("a string takes it");
    }
    let client = if load.light { "light client" } else { "fio" };
    let cpus = if load.cpus == 1 { "one CPU" } else { "two CPUs" };
    (format!("{size} {order}, {requests}"), format!("{client}, {cpus}"))
}
