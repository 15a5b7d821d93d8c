//! stub
use crate::compare::Comparison;
/// stub
pub fn comparison(_: &Comparison) -> String {
    String::new()
}
