//! The descriptors of the rseq sections in this program, as the linker wrote them.
//!
//! The kernel does not check a start or a length: if one is wrong, the section is unprotected. If
//! the abort address is wrong or its signature is missing, the kernel kills the process.
#![cfg(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(any(offlock_portable, offlock_virtual_cpu))
))]

use std::collections::BTreeMap;
use std::env;
use std::fs;

use object::read::elf::ElfFile64;
use object::{Object, ObjectSection, RelocationTarget};

const SIGNATURE: [u8; 4] =
    (if cfg!(target_arch = "x86_64") { 0x5305_3053_u32 } else { 0xd428_bc00 }).to_le_bytes();

/// `struct rseq_cs` (ABI: `linux/rseq.h`).
const SIZE: u64 = 32;
const START: u64 = 8;
const LENGTH: u64 = 16;
const ABORT: u64 = 24;

/// The most bytes of a section. The longest one has 70.
const LONGEST: u64 = 256;

/// One section of the program: its address and its bytes.
struct Part<'a> {
    at: u64,
    bytes: &'a [u8],
}

impl<'a> Part<'a> {
    fn named(file: &ElfFile64<'a>, name: &str) -> Self {
        let section = file.section_by_name(name).unwrap_or_else(|| panic!("no section {name}"));
        Self { at: section.address(), bytes: section.data().unwrap() }
    }

    fn holds(&self, at: u64) -> bool {
        (self.at..self.at + self.bytes.len() as u64).contains(&at)
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let from = usize::try_from(at - self.at).unwrap();
        self.bytes[from..from + N].try_into().unwrap()
    }
}

#[test]
fn every_descriptor_in_this_program_is_sound() {
    println!("{}", offlock_percpu::capabilities()); // links the self-test
    let bytes = fs::read(env::current_exe().unwrap()).unwrap();
    let file = ElfFile64::parse(&*bytes).unwrap();
    let descriptors = Part::named(&file, "__rseq_cs");
    let failures = Part::named(&file, "__rseq_failure");
    let text = Part::named(&file, ".text");

    // The addresses of a position-independent program are in its relocations, which the loader
    // applies.
    let relocated: BTreeMap<u64, u64> = file
        .dynamic_relocations()
        .into_iter()
        .flatten()
        .filter(|(at, _)| descriptors.holds(*at))
        .map(|(at, relocation)| {
            assert_eq!(relocation.target(), RelocationTarget::Absolute, "at {at:#x}");
            (at, relocation.addend() as u64)
        })
        .collect();
    let address = |at: u64| match relocated.get(&at) {
        Some(&address) => address,
        None => u64::from_le_bytes(descriptors.read(at)),
    };

    assert_eq!(descriptors.at % SIZE, 0, "descriptors are 32-byte aligned");
    assert_eq!(descriptors.bytes.len() as u64 % SIZE, 0, "their section has only descriptors");
    let count = descriptors.bytes.len() as u64 / SIZE;
    for one in (0..count).map(|i| descriptors.at + i * SIZE) {
        assert_eq!(descriptors.read(one), [0; 8], "version and flags of {one:#x}");
        let (start, abort) = (address(one + START), address(one + ABORT));
        let length = u64::from_le_bytes(descriptors.read(one + LENGTH));
        assert!(relocated.is_empty() || relocated.contains_key(&(one + ABORT)));
        assert!((1..LONGEST).contains(&length), "{length} bytes at {start:#x}");
        assert!(text.holds(start) && text.holds(start + length), "no code at {start:#x}");
        assert!(failures.holds(abort), "abort at {abort:#x}");
        assert!(!(start..start + length).contains(&abort));
        assert_eq!(failures.read(abort - 4), SIGNATURE, "in front of {abort:#x}");
    }
    println!("{count} descriptors");
    assert!(count >= 2, "the self-test adds with a gate and without");
}
