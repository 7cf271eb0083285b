"""One call for each thing the command line does. The only code that joins the stages."""
