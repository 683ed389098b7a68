//! Ids in serialised data.

use radix_ctx::{CtxTable, Id};

#[test]
fn an_id_is_its_text_in_json() {
    let table = CtxTable::new();
    let id = table.insert(()).unwrap();
    let json = serde_json::to_string(&id).unwrap();
    assert_eq!(json, "\"0.1\"");
    assert_eq!(serde_json::from_str::<Id>(&json).unwrap(), id);
    assert_eq!(serde_json::from_value::<Id>(json[1..4].into()).unwrap(), id);
}

#[test]
fn data_that_no_table_wrote_is_an_error() {
    for json in ["\"1\"", "\"1.0\"", "\"\"", "17", "null"] {
        let error = serde_json::from_str::<Id>(json).unwrap_err().to_string();
        assert!(error.contains("not an id") || error.contains("string"), "{json}: {error}");
    }
}
