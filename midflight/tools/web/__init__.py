"""Tools that speak to the network: search, pages, Wikipedia. All requests go through `http.Web`."""
