"""The speculation controller: how many nodes a sweep carries. Source: SmartSpec (arXiv 2406.14066)."""
