//! The only list of device forms.

use crate::plan::unsupported;
use crate::{Form, Result, methods};

/// Every method that has a device form.
pub static FORMS: &[&Form] = &[
    &methods::exact::NAIVE,
    &methods::exact::EXACT,
    &methods::sink_window::FORM,
    &methods::hyper::FORM,
    &methods::linear::FORM,
    &methods::performer::FORM,
    &methods::crt::FORM,
    &methods::polaformer::FORM,
    &methods::hybrid_features::FORM,
    &methods::top_k::FORM,
    &methods::loki::FORM,
    &methods::nystromformer::FORM,
    &methods::linformer::FORM,
];

/// Returns the device form of a method; if there is none, the error gives the reason.
pub fn form(id: &str) -> Result<&'static Form> {
    attlas::registry::method(id)?;
    FORMS.iter().copied().find(|f| f.method.id == id).ok_or_else(|| {
        let known: Vec<&str> = FORMS.iter().map(|f| f.method.id).collect();
        unsupported(id, format!("it has no form on the device yet; {} have one", known.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_method_has_a_form_or_a_reason() {
        for method in attlas::registry::METHODS {
            match form(method.id) {
                Ok(form) => assert_eq!(form.method.id, method.id),
                Err(e) => assert!(e.to_string().contains("no form on the device"), "{e}"),
            }
        }
        assert!(form("nonsense").unwrap_err().to_string().contains("there is no method"));
    }
}
